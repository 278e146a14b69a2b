/* What each file of C code needs; the first include of each .c, and of what the compiler gets from cffi. */
#pragma once

#ifndef _GNU_SOURCE /* Python.h defines it too */
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"
#include "bytes.h"
#include "failpoint.h"
#include "futex.h"
