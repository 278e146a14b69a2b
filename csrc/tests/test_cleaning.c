/* Holds on segments are taken, released, refused once a deletion has begun, and reaped. */
#include "check.h"

#include <errno.h>

#include "../cleaning.h"

#define ALICE ((uint64_t)7 << 32 | 70)
#define BOB ((uint64_t)8 << 32 | 80)

static struct ms_cleaning cleaning;

static void begin(void)
{
    memset(&cleaning, 0, sizeof(cleaning));
    ms_cleaning_format(&cleaning, 3);
}

static void an_object_is_checked(void)
{
    begin();
    CHECK(ms_cleaning_check(&cleaning, sizeof(cleaning)) == 0);
    CHECK(ms_cleaning_check(&cleaning, sizeof(cleaning) - 1) == -EMSGSIZE);
    CHECK(ms_cleaning_check(&cleaning, 8) == -EMSGSIZE);
    cleaning.layout_version++;
    CHECK(ms_cleaning_check(&cleaning, sizeof(cleaning)) == -EBADMSG);
    cleaning.magic++;
    CHECK(ms_cleaning_check(&cleaning, sizeof(cleaning)) == -EPROTO);
}

static void a_hold_is_seen_until_it_is_given_back(void)
{
    begin();
    int32_t first = ms_hold_take(&cleaning, ALICE, 0), second = ms_hold_take(&cleaning, BOB, 100);
    CHECK(first >= 0 && second >= 0 && first != second);
    CHECK(ms_hold_find(&cleaning, 0, 100) == first);
    CHECK(ms_hold_find(&cleaning, first + 1, 100) == -1);
    CHECK(ms_hold_find(&cleaning, 0, 0) == -1);
    ms_hold_release(&cleaning, first, BOB); /* not its own */
    CHECK(ms_hold_find(&cleaning, 0, 100) == first);
    ms_hold_release(&cleaning, first, ALICE);
    CHECK(ms_hold_find(&cleaning, 0, 100) == -1);
    CHECK(ms_hold_find(&cleaning, 0, -1) == second);
    ms_hold_release(&cleaning, -1, ALICE);
    ms_hold_release(&cleaning, MS_HOLDS_MAX, ALICE);
}

static void below_the_deletion_nobody_gets_a_hold(void)
{
    begin();
    int32_t held = ms_hold_take(&cleaning, ALICE, 0);
    ms_cleaning_refuse_holds(&cleaning, 100);
    CHECK(ms_hold_take(&cleaning, BOB, 0) == -ENOENT);
    CHECK(ms_hold_take(&cleaning, BOB, 100) >= 0);
    CHECK(ms_hold_find(&cleaning, 0, 100) == held);
    ms_cleaning_refuse_holds(&cleaning, 50); /* removing_end never decreases */
    CHECK(ms_hold_take(&cleaning, BOB, 50) == -ENOENT);
}

static void only_the_dead_ones_hold_is_reaped(void)
{
    begin();
    int32_t slot = ms_hold_take(&cleaning, ALICE, 0);
    CHECK(ms_hold_reap(&cleaning, slot, BOB) == 0);
    CHECK(ms_hold_reap(&cleaning, slot, 0) == 0);
    CHECK(ms_hold_reap(&cleaning, MS_HOLDS_MAX, ALICE) == 0);
    CHECK(ms_hold_reap(&cleaning, slot, ALICE) == 1);
    CHECK(ms_hold_reap(&cleaning, slot, ALICE) == 0);
    CHECK(ms_hold_find(&cleaning, 0, -1) == -1);
    /* A reader that was killed between taking the slot and storing the segment owns a slot and holds nothing. */
    cleaning.holds[5].owner = ALICE;
    CHECK(ms_hold_find(&cleaning, 0, 1000) == -1 && ms_hold_find(&cleaning, 0, -1) == 5);
    CHECK(ms_hold_reap(&cleaning, 5, ALICE) == 1);
}

static void a_full_table_says_so(void)
{
    begin();
    for (int i = 0; i < MS_HOLDS_MAX; i++)
        CHECK(ms_hold_take(&cleaning, ALICE + (uint64_t)i, i) >= 0);
    CHECK(ms_hold_take(&cleaning, BOB, 5) == -EAGAIN);
    ms_hold_release(&cleaning, 9, cleaning.holds[9].owner);
    CHECK(ms_hold_take(&cleaning, BOB, 5) == 9);
}

int main(void)
{
    dice_begin("test_cleaning");
    an_object_is_checked();
    a_hold_is_seen_until_it_is_given_back();
    below_the_deletion_nobody_gets_a_hold();
    only_the_dead_ones_hold_is_reaped();
    a_full_table_says_so();
    return 0;
}
