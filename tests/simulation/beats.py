def begin(world): raise NotImplementedError
