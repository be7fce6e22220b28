"""What makes two calls of a task the same, as a short text that is equal in every process.

Begin with `call.py`: it chooses of the `arguments` of a call, has them encoded (`encoding`), and makes a `key` of that.
"""
