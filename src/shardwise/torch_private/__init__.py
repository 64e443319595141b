"""Private names of torch, all of them, one file per area; the rest of shardwise uses what is public, and these files.

Every name here exists in torch 2.11 and in 2.13, the versions that shardwise is tested on, unless its docstring says
otherwise. Where a later torch lacks a name, a function returns what its docstring says, and raises `WorldError` where
nothing can stand in for it. `runtime` and `distributed` import no torch by themselves: launchers and the recorder read
them before torch is loaded.
"""
