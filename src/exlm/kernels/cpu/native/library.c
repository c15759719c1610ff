/* The whole library, compiled as one: its threads and tables are shared by all of it. */

#include "cpu.c"

#include "layer.h"
