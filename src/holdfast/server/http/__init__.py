"""What every connection and request passes before a route sees it: hosts, keys, sizes, deadlines, errors."""
