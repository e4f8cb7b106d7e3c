"""Sources: single examples by index, read from files and from other libraries' collections."""
