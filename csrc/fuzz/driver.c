/* Runs a fuzz target if the compiler has no libFuzzer: it keeps inputs that reach new code, and mutates them.
 *
 * usage: fuzz_X [-runs=N] [-seed=N] [-last=FILE] [FOLDER ...]     the first folder takes new inputs
 * The code under test is built with -fsanitize-coverage=trace-pc; each edge of its control flow is one bit. FILE has the
 * current input, so after a crash it is the failing one: fuzz_X -runs=0 FOLDER repeats it.
 */
#include "target.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#define PLACES (1 << 20)
#define INPUTS_MAX 4096
#define HEAD_BYTES 128

static uint8_t reached[PLACES];
static int new_places;
static struct {
    uint8_t *at;
    size_t size;
} inputs[INPUTS_MAX];
static int input_count;
static uint8_t *last;
static const char *keep_in;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void)
{
    static uintptr_t before;
    const uintptr_t here = (uintptr_t)__builtin_return_address(0) * 0x9E3779B97F4A7C15ull >> 40;
    uint8_t *const mark = &reached[(here ^ before) % PLACES];
    before = here >> 1;
    new_places += !*mark;
    *mark = 1;
}

static void remember(const uint8_t *data, size_t size)
{
    if (input_count == INPUTS_MAX)
        return;
    inputs[input_count].at = malloc(size + 1);
    inputs[input_count].size = size;
    memcpy(inputs[input_count++].at, data, size);
}

static void run(const uint8_t *data, size_t size, int is_new)
{
    if (size > INPUT_BYTES_MAX)
        return;
    if (last != NULL) {
        memcpy(last, &size, sizeof size);
        memcpy(last + sizeof size, data, size);
    }
    new_places = 0;
    LLVMFuzzerTestOneInput(data, size);
    if (!new_places && is_new)
        return;
    remember(data, size);
    if (is_new && keep_in != NULL) {
        char path[4096];
        uint64_t hash = 14695981039346656037ull;
        for (size_t i = 0; i < size; i++)
            hash = (hash ^ data[i]) * 1099511628211ull;
        snprintf(path, sizeof path, "%s/%016llx", keep_in, (unsigned long long)hash);
        FILE *file = fopen(path, "wb");
        if (file != NULL) {
            fwrite(data, 1, size, file);
            fclose(file);
        }
    }
}

static void run_seed(const uint8_t *data, size_t size)
{
    run(data, size, 1);
}

static void run_folder(const char *folder)
{
    DIR *entries = opendir(folder);
    CHECK(entries != NULL);
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        static uint8_t bytes[INPUT_BYTES_MAX];
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (file == NULL)
            continue;
        run(bytes, fread(bytes, 1, sizeof bytes, file), 0);
        fclose(file);
    }
    closedir(entries);
}

static size_t change(uint8_t *data, size_t size)
{
    static const uint32_t nasty[] = {0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
                                     MS_RECORD_MAGIC, MS_BLANK_MAGIC, 19, 20, 21, 90, 91, 92};
    for (uint64_t changes = 1 + dice(4); changes > 0; changes--) {
        const size_t near = size < HEAD_BYTES || dice(3) == 0 ? size : HEAD_BYTES; /* parameters and the first record */
        const size_t at = size ? dice(near) : 0;
        const uint32_t number = nasty[dice(sizeof nasty / sizeof *nasty)];
        switch (size ? dice(8) : 7) {
        case 0:
            data[at] ^= (uint8_t)(1u << dice(8));
            break;
        case 1:
            data[at] = (uint8_t)dice(256);
            break;
        case 2: /* a number, big-endian */
            for (size_t i = 0; i < 4 && at + i < size; i++)
                data[at + i] = (uint8_t)(number >> (24 - 8 * i));
            break;
        case 3: /* and little-endian */
            for (size_t i = 0; i < 4 && at + i < size; i++)
                data[at + i] = (uint8_t)(number >> (8 * i));
            break;
        case 4:
            data[at] += (uint8_t)(dice(2) ? 1 : -1);
            break;
        case 5: /* cut */
            size = at;
            break;
        case 6: { /* copy a piece over another */
            const size_t from = dice(size), bytes = dice(64);
            for (size_t i = 0; i < bytes && at + i < size && from + i < size; i++)
                data[at + i] = data[from + i];
            break;
        }
        default: /* grow, with a piece of another input */
            if (input_count > 0) {
                const int other = (int)dice((uint64_t)input_count);
                const size_t from = inputs[other].size ? dice(inputs[other].size) : 0;
                for (size_t i = from; i < inputs[other].size && size < INPUT_BYTES_MAX && i < from + 256; i++)
                    data[size++] = inputs[other].at[i];
            }
        }
    }
    return size;
}

int main(int argc, char **argv)
{
    long runs = 100000;
    uint64_t seed = (uint64_t)getpid();
    static uint8_t work[INPUT_BYTES_MAX];
    for (int i = 1; i < argc; i++) {
        if (sscanf(argv[i], "-runs=%ld", &runs) == 1)
            continue;
        if (strncmp(argv[i], "-seed=", 6) == 0)
            seed = strtoull(argv[i] + 6, NULL, 10);
        else if (strncmp(argv[i], "-last=", 6) == 0) {
            const int fd = open(argv[i] + 6, O_RDWR | O_CREAT | O_TRUNC, 0644);
            CHECK(fd >= 0 && ftruncate(fd, INPUT_BYTES_MAX + 8) == 0);
            last = mmap(NULL, INPUT_BYTES_MAX + 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            CHECK(last != MAP_FAILED);
        } else if (keep_in == NULL)
            keep_in = argv[i];
    }
    for (int i = 1; i < argc; i++)
        if (argv[i][0] != '-')
            run_folder(argv[i]);
    fuzz_seeds(run_seed);
    start_seed = seed;
    dice_state = seed * 2654435761u | 1;
    const int begun_with = input_count;
    for (long number = 0; number < runs && input_count > 0; number++) {
        const int chosen = (int)dice((uint64_t)input_count);
        memcpy(work, inputs[chosen].at, inputs[chosen].size);
        run(work, change(work, inputs[chosen].size), 1);
    }
    int places = 0;
    for (int i = 0; i < PLACES; i++)
        places += reached[i];
    printf("seed %llu: %ld runs, %d inputs (%d new), %d steps\n", (unsigned long long)seed, runs, input_count,
           input_count - begun_with, places);
    return 0;
}
