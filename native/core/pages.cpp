// Large pages for ggml's large buffers: weights in a CPU's own layout, KV, graphs.
//
// Reading all weights for every token, a virtual machine spends a tenth of its time looking up 4 KiB pages. Linux gives
// 2 MiB pages where they are asked for (transparent_hugepage=madvise, the common setting), and ggml does not ask. The
// extension is linked with --wrap=posix_memalign, so ggml's allocations come here; nobody else's in the process do.
#ifdef __linux__
#include <sys/mman.h>

#include <cstddef>

extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names.
int __real_posix_memalign(void **out, size_t alignment, size_t size);
int __wrap_posix_memalign(void **out, size_t alignment, size_t size);

int __wrap_posix_memalign(void **out, size_t alignment, size_t size) {
    constexpr size_t large_page = size_t{2} << 20;
    if (size < 2 * large_page || alignment > large_page) {
        return __real_posix_memalign(out, alignment, size);
    }
    const int failed = __real_posix_memalign(out, large_page, size);
    if (!failed) {
        madvise(*out, size & ~(large_page - 1), MADV_HUGEPAGE);  // a wish; without it the pages are small
    }
    return failed;
}
// NOLINTEND(bugprone-reserved-identifier)
}
#endif
