/* Lists directories below one that an agent could write, with what a scan asks of every entry.
 *
 * LISTER MOST [SKIPPED...]: descriptor 0 is a socket of packets, 3 the root. A packet that comes holds requests: a
 * number of 32 bits and a path below the root, ended by a zero byte; the empty one for the root itself, in which
 * SKIPPED names are passed over. A packet that goes out holds one or more `struct chunk`, each followed by `names`
 * bytes with the files that are as they should be, a slash before each, and by `odd` bytes of `struct odd`, each with
 * its name and link target behind it. As it should be is a regular file of the root's file system with at most MOST
 * bytes and no setuid or setgid.
 *
 * No link is followed, no mount entered, no file opened. It holds one packet at a time, and ends with its socket.
 */
#define _GNU_SOURCE /* for AT_EMPTY_PATH */
#include "sys.h"
#include <linux/openat2.h>
#include <linux/stat.h>

#define ROOT 3
#define PATH_BYTES 4096 /* of a name, too: some file systems know no less */
#define FULL 14000 /* bytes of names, or of odd entries, after which a chunk is sent */
#define PACKET 65536
#define ODD_MOST (sizeof(struct odd) + 2 * PATH_BYTES)
#define CHUNK_MOST (sizeof(struct chunk) + 2 * FULL + PATH_BYTES + ODD_MOST)

struct chunk {
    u64 bytes; /* of the files in `names` */
    u32 request, files, names, odd;
    i32 status; /* -1: more of this directory follows; 0: that was all; else the errno that ended it */
    u32 padding;
};

struct odd {
    u64 size;
    u32 mode; /* its type alone for a directory */
    u16 name, target;
    u32 foreign, padding; /* whether it is of another file system */
};

struct entry {
    u64 inode, offset;
    u16 length;
    u8 type;
    char name[];
};

static u8 out[PACKET];
_Static_assert(CHUNK_MOST <= PACKET, "a chunk fits");
static size_t out_used;
static u8 odd[FULL + ODD_MOST];
static struct chunk chunk;
static u64 most;
static u32 device_major, device_minor;

static void flush(void)
{
    if (out_used && SYS(write, 0, out, out_used) != (long)out_used)
        quit(1);
    out_used = 0;
}

static void open_chunk(u32 request)
{
    if (sizeof out - out_used < CHUNK_MOST)
        flush();
    memset(&chunk, 0, sizeof chunk);
    chunk.request = request;
}

static void close_chunk(i32 status)
{
    chunk.status = status;
    u8 *at = out + out_used;
    memcpy(at, &chunk, sizeof chunk);
    at += sizeof chunk + chunk.names;
    memcpy(at, odd, chunk.odd);
    out_used += sizeof chunk + chunk.names + chunk.odd;
}

static long add_odd(int directory, const char *name, struct odd found)
{
    u8 *at = odd + chunk.odd;
    u8 *text = at + sizeof found;
    found.name = (u16)length_of(name);
    memcpy(text, name, found.name);
    if ((found.mode & S_IFMT) == S_IFLNK) {
        long n = SYS(readlinkat, directory, name, text + found.name, PATH_BYTES);
        if (n < 0)
            return n;
        found.target = (u16)n;
    }
    memcpy(at, &found, sizeof found);
    chunk.odd += (u32)sizeof found + found.name + found.target;
    return 0;
}

static long add(int directory, const struct entry *entry)
{
    struct statx found;
    if (entry->type == 4 /* DT_DIR */)
        return add_odd(directory, entry->name, (struct odd){.mode = S_IFDIR});
    long failed = SYS(statx, directory, entry->name, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT,
                      STATX_TYPE | STATX_MODE | STATX_SIZE, &found);
    if (failed)
        return failed;
    bool foreign = found.stx_dev_major != device_major || found.stx_dev_minor != device_minor;
    bool plain = (found.stx_mode & S_IFMT) == S_IFREG && !(found.stx_mode & (S_ISUID | S_ISGID));
    if (foreign || !plain || found.stx_size > most)
        return add_odd(directory, entry->name,
                       (struct odd){.size = found.stx_size, .mode = found.stx_mode, .foreign = foreign});
    size_t length = length_of(entry->name);
    u8 *at = out + out_used + sizeof chunk + chunk.names;
    *at = '/';
    memcpy(at + 1, entry->name, length);
    chunk.names += (u32)length + 1;
    chunk.files++;
    chunk.bytes += found.stx_size;
    return 0;
}

static bool passed_over(const char *name, char **skipped)
{
    size_t length = length_of(name) + 1;
    if (same(name, ".", 2) || (name[0] == '.' && same(name + 1, ".", 2)))
        return true;
    for (; skipped && *skipped; skipped++)
        if (length_of(*skipped) + 1 == length && same(name, *skipped, length))
            return true;
    return false;
}

static long list_open(int directory, char **skipped)
{
    static u8 entries[65536] __attribute__((aligned(8)));
    for (;;) {
        long n = SYS(getdents64, directory, entries, sizeof entries);
        if (n <= 0)
            return n;
        for (long at = 0; at < n;) {
            struct entry *entry = (struct entry *)(entries + at);
            at += entry->length;
            if (length_of(entry->name) >= PATH_BYTES)
                return -ENAMETOOLONG;
            long failed = passed_over(entry->name, skipped) ? 0 : add(directory, entry);
            if (failed)
                return failed;
            if (chunk.names >= FULL || chunk.odd >= FULL) {
                close_chunk(-1);
                open_chunk(chunk.request);
            }
        }
    }
}

static void list(u32 request, const char *path, char **skipped)
{
    struct open_how how = {
        .flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    open_chunk(request);
    long directory = SYS(openat2, ROOT, *path ? path : ".", &how, sizeof how);
    long ended = directory;
    if (directory >= 0) {
        ended = list_open((int)directory, *path ? NULL : skipped);
        SYS(close, directory);
    }
    close_chunk((i32)-ended);
}

static int serve(char **argv)
{
    static char packet[2 * PATH_BYTES];
    struct statx root;
    if (SYS(statx, ROOT, "", AT_EMPTY_PATH, STATX_TYPE, &root))
        return 1;
    device_major = root.stx_dev_major;
    device_minor = root.stx_dev_minor;
    most = number_of(argv[1]);
    for (;;) {
        long held = SYS(read, 0, packet, sizeof packet - 1);
        if (held <= 0)
            return held < 0;
        packet[held] = 0;
        for (char *at = packet; at + sizeof(u32) < packet + held;) {
            u32 request;
            memcpy(&request, at, sizeof request);
            at += sizeof request;
            list(request, at, argv + 2);
            at += length_of(at) + 1;
        }
        flush();
    }
}

#ifdef HOSTED
int main(int argc, char **argv)
{
    return argc < 2 ? 1 : serve(argv);
}
#else
__attribute__((used)) void begin(long *stack)
{
    quit(stack[0] < 2 ? 1 : serve((char **)(stack + 1)));
}
__asm__(".globl _start\n_start:\n" ENTRY);
#endif
