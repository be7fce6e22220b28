"""The key of a lock: a short text, equal in every process, of what makes two calls of a task the same.

Begin with `call.py`: it chooses of the `arguments` of a call, has them encoded (`encoding`), and makes a `key` of that.
"""
