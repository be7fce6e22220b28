"""The key of a lock: a short text for what makes two calls of a task the same, equal in every process.

Begin with `key.py`: it selects from the `arguments` of a call, encodes them (`encoding`), and makes a key from that.
"""
