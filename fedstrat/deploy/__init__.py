"""What real nodes need: keys and certificates, their registration, and checks before a start. No torch in sight."""
