"""Networks in torchvision's names, and their heads."""
