"""What a step of a program is: its call, its text, its memory, its sizes."""
