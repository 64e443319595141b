"""All uses of private torch APIs; the other packages of shardwise use public APIs and these modules only.

Every private name here exists in torch 2.11 and 2.13, the versions that shardwise is tested with, unless a docstring
states otherwise. If a later torch lacks a name, the function returns the fallback in its docstring, or raises
`WorldError` if there is none. `distributed` does not import torch at module level, because launchers and the recorder
import it before torch.
"""
