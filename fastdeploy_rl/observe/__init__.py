"""What people are told about machines and engines: the doctor's findings, and sizes in words."""
