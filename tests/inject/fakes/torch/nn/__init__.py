"""Modules."""


class Module:
    def __setattr__(self, name, value):
        if isinstance(value, Module):
            self.__dict__.setdefault("_modules", {})[name] = value
        object.__setattr__(self, name, value)

    def __call__(self, *args):
        return self.forward(*args)
