#pragma once

#include "control.h"
#include "session.h"
#include "producer.cdef.h"
