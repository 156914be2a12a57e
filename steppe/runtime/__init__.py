"""The only code that names process groups, streams and pinned memory; import its modules by name."""
