"""What happened to each copy of a message: collected in the process, written every few seconds, counted, read.

Begin with `writer.py`.
"""
