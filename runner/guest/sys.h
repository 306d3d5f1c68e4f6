/* The kernel without a C library: calls return a value, or a negative errno.
 *
 * Only the generic system calls are used, which every architecture has since arm64. Headers give
 * numbers and types; no function of a library is called.
 */
#include <asm/unistd.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/types.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <asm-generic/errno.h>
#include <asm-generic/errno-base.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;
typedef uint64_t u64;

#if defined(__x86_64__)
static inline long sys(long n, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#define AUDIT_NATIVE AUDIT_ARCH_X86_64
#define ENTRY "xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n"
#elif defined(__aarch64__)
static inline long sys(long n, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = n;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#define AUDIT_NATIVE AUDIT_ARCH_AARCH64
#define ENTRY "mov x29, #0\n mov x30, #0\n mov x0, sp\n bl begin\n"
#else
#error "the guest runs on x86_64 and arm64"
#endif

#define ARG(x) ((long)(x))
#define SYS(name, ...) SYS_(__NR_##name, __VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define SYS_(n, a, b, c, d, e, f, ...) sys(n, ARG(a), ARG(b), ARG(c), ARG(d), ARG(e), ARG(f))

#ifndef HOSTED
/* The compiler calls these by itself, too. */
void *memcpy(void *restrict to, const void *restrict from, size_t n)
{
#if defined(__x86_64__)
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
    return start;
#else
    u8 *t = to;
    const u8 *f = from;
    for (; n >= 8; n -= 8, t += 8, f += 8)
        *(volatile u64 *)t = *(const u64 *)f;
    while (n--)
        *(volatile u8 *)t++ = *f++;
    return to;
#endif
}

void *memset(void *to, int value, size_t n)
{
    for (volatile u8 *t = to; n--;)
        *t++ = (u8)value;
    return to;
}
#else
#include <string.h>
#endif

static inline void quit(int status)
{
    for (;;)
        SYS(exit_group, status);
}

static inline long now_ms(void)
{
    struct { long seconds, nanoseconds; } t;
    SYS(clock_gettime, 1, &t);
    return t.seconds * 1000 + t.nanoseconds / 1000000;
}

static inline void *map_pages(size_t bytes)
{
    long at = SYS(mmap, 0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    return at < 0 && at > -4096 ? NULL : (void *)at;
}

static inline size_t length_of(const char *text)
{
    size_t n = 0;
    while (text[n])
        n++;
    return n;
}

static inline u64 number_of(const char *digits)
{
    u64 number = 0;
    for (; *digits; digits++)
        number = number * 10 + (u64)(*digits - '0');
    return number;
}

static inline bool same(const void *a, const void *b, size_t n)
{
    const u8 *x = a, *y = b;
    u8 difference = 0;
    while (n--)
        difference |= *x++ ^ *y++;
    return !difference;
}

/* Write "PREFIX NUMBER SUFFIX" without the spaces. */
static inline void join(char *to, const char *prefix, u32 number, const char *suffix)
{
    char digits[10];
    int n = 0;
    do
        digits[n++] = (char)('0' + number % 10);
    while (number /= 10);
    while (*prefix)
        *to++ = *prefix++;
    while (n)
        *to++ = digits[--n];
    while ((*to++ = *suffix++))
        ;
}
