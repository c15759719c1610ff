/* The whole library, compiled as one: its threads and tables are shared by all of it. */

#include "linear.h"

#include "decoder_layer.h"
