"""Work on a device that is not learning."""
