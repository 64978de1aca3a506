"""What a profile looks like: as text, as a page, and beside another one."""
