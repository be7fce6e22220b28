"""The key of a lock: a short text, equal in every process, of what makes two calls of a task the same.

Begin with `call.py`: it selects from the `arguments` of a call, encodes them (`encoding`), and makes a `key` of that.
"""
