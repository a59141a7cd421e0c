#!/bin/sh
# Each rank bound to its cores, as wrappers do it.
exec taskset -c 0 "$@"
