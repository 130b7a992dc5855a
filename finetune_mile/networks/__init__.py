"""Networks in torchvision's names."""
