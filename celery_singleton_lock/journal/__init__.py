"""The history of each copy of a message: collected in the process, written every few seconds, counted and read.

Begin with `writer.py`.
"""
