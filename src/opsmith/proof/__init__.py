"""What judges any card: is it right, and how fast is it?"""
