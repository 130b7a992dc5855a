"""`python -m finetune_mile VERB ...`: the same as `finetune-mile`."""

import sys

from finetune_mile.cli import main

sys.exit(main())
