"""How sizes read for people."""


def size_text(num_bytes: int) -> str:
    """As people read it: `31.3 GB`, `67.1 MB`, `4.1 KB`, `64 bytes`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
