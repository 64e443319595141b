"""`python -m shardwise` is the command line."""

import sys

from shardwise.cli.main import main

sys.exit(main())
