"""What a profile looks like: as text, as a page, as a timeline, and beside another one."""
