"""Generated from protos/outrider/v1 by scripts/gen_stubs; do not edit."""
