/* Files of a sandbox for the host, which shares no directory with it: what there is, and what is in some of it.
 *
 * `guest list [-SKIPPED...] ROOT...` writes, for each entry below a root, a stamp that differs once the entry was
 * changed, a blank, its path and a zero byte; after each root comes a lone zero byte. SKIPPED paths of the first root
 * and placeholders are passed over. `guest pack ROOT` reads paths, each ended by a zero byte, up to an empty one or the
 * end, and writes for each that is there a `struct packed`, its name, the target of a link, and `size` bytes of
 * content. `guest remove ROOT` reads paths in the same way, each after those below it, and removes what is there, but
 * for directories that are not empty. No link is followed. Each ends with 0, or with 1 when there is something that its
 * user cannot read or remove.
 *
 * `guest show PATH BYTES` writes a line and the beginning of a file below the current directory, whatever links lead to
 * it: what was opened is judged by the name that the kernel has for it. It ends as scripts of tools do, see
 * ops/tools/_sandbox.py: with 0, 71 when there is none, 72 when it is outside, 73 when it is no file, 1 otherwise.
 */
#include <linux/openat2.h>
#include <linux/stat.h>

#ifndef O_PATH /* hidden by headers, like those that follow */
#define O_PATH 010000000
#define AT_NO_AUTOMOUNT 0x800
#define AT_REMOVEDIR 0x200
#define AT_EMPTY_PATH 0x1000
#endif

enum { PATH_BYTES = 4096, WAITING = 1 << 28, FULL = 1 << 16, STAMP_BYTES = 96 };

struct entry {
    u64 inode, offset;
    u16 length;
    u8 type;
    char name[];
};

struct packed {
    u64 size;
    int64_t seconds; /* when it was changed last */
    u32 mode;
    u16 name, target;
};

static u8 said[FULL + 2 * PATH_BYTES + STAMP_BYTES];
static size_t said_size;
static int top;
static bool opens; /* what its user cannot read is made readable, and nothing is said */

static void put_all(const u8 *from, size_t size)
{
    while (size) {
        long n = SYS(write, 1, from, size);
        if (n < 0 && n != -EINTR)
            quit(2);
        from += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
}

static void put(const void *from, size_t size)
{
    if (opens)
        return;
    memcpy(said + said_size, from, size);
    said_size += size;
    if (said_size >= FULL) {
        put_all(said, said_size);
        said_size = 0;
    }
}

static void put_number(u64 number)
{
    char digits[17];
    int at = 16;
    digits[16] = ',';
    do
        digits[--at] = "0123456789abcdef"[number & 15];
    while (number >>= 4);
    put(digits + at, (size_t)(17 - at));
}

static long open_below(const char *path, u64 flags)
{
    struct open_how how = {
        .flags = flags | O_NOFOLLOW | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    return SYS(openat2, top, *path ? path : ".", &how, sizeof how);
}

/* What stands for a protected path that is not there, see protected_paths.py: it is nobody's file. */
static bool is_placeholder(const struct statx *found)
{
    return !(found->stx_mode & 07777) && found->stx_mtime.tv_sec == 1 &&
           ((found->stx_mode & S_IFMT) == S_IFDIR || ((found->stx_mode & S_IFMT) == S_IFREG && !found->stx_size));
}

static bool is_skipped(const char *path, char **skipped, int count)
{
    size_t length = length_of(path) + 1;
    for (int i = 0; i < count; i++)
        if (length_of(skipped[i]) == length && same(path, skipped[i] + 1, length))
            return true;
    return false;
}

/* Say what is in a directory, and put the directories among it behind each other at `end`; where they end. */
static char *list_directory(const char *path, char *end, const char *limit, char **skipped, int count)
{
    static u8 entries[1 << 16] __attribute__((aligned(8)));
    static char name[2 * PATH_BYTES];
    size_t prefix = length_of(path);
    long n = 0, directory = open_below(path, O_RDONLY | O_DIRECTORY);
    if (directory == -EACCES && opens && SYS(fchmodat, top, *path ? path : ".", 0700) == 0)
        directory = open_below(path, O_RDONLY | O_DIRECTORY);
    if (directory < 0)
        quit(1);
    memcpy(name, path, prefix);
    if (prefix)
        name[prefix++] = '/';
    while ((n = SYS(getdents64, directory, entries, sizeof entries)) > 0)
        for (long at = 0; at < n;) {
            struct entry *entry = (struct entry *)(entries + at);
            struct statx found;
            size_t length = length_of(entry->name) + 1;
            at += entry->length;
            if (same(entry->name, ".", 2) || (entry->name[0] == '.' && same(entry->name + 1, ".", 2)))
                continue;
            if (prefix + length > PATH_BYTES)
                quit(1);
            memcpy(name + prefix, entry->name, length);
            if (is_skipped(name, skipped, count))
                continue;
            if (SYS(statx, directory, entry->name, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, &found))
                continue; /* removed meanwhile */
            if (is_placeholder(&found))
                continue;
            bool is_directory = (found.stx_mode & S_IFMT) == S_IFDIR;
            if (opens && (found.stx_mode & S_IFMT) == S_IFREG && !(found.stx_mode & 0400))
                SYS(fchmodat, directory, entry->name, (found.stx_mode & 07777) | 0400);
            put_number(found.stx_mode);
            if (!is_directory) {
                put_number(found.stx_ino);
                put_number(found.stx_size);
                put_number((u64)found.stx_ctime.tv_sec);
                put_number(found.stx_ctime.tv_nsec);
            }
            put(" ", 1);
            put(name, prefix + length);
            if (is_directory) {
                if (end + prefix + length > limit)
                    quit(1);
                memcpy(end, name, prefix + length);
                end += prefix + length;
            }
        }
    SYS(close, directory);
    if (n < 0)
        quit(1);
    return end;
}

static void list_tree(const char *root, char *waiting, char **skipped, int count)
{
    top = (int)SYS(openat, AT_FDCWD, root, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (top < 0)
        quit(1);
    char *end = list_directory("", waiting, waiting + WAITING, skipped, count);
    for (char *at = waiting; at < end; at += length_of(at) + 1)
        end = list_directory(at, end, waiting + WAITING, skipped, count);
    SYS(close, top);
    put("", 1);
}

static int list_trees(int count, char **words)
{
    char *waiting = map_pages(WAITING);
    int skipped = 0;
    while (skipped < count && words[skipped][0] == '-')
        skipped++;
    for (int i = skipped; waiting && i < count; i++)
        list_tree(words[i], waiting, words, i == skipped ? skipped : 0);
    put_all(said, said_size);
    return !waiting;
}

static void pack_content(int fd, u64 size)
{
    static u8 content[1 << 16];
    while (size) {
        long n = SYS(read, fd, content, size < sizeof content ? size : sizeof content);
        if (n == -EINTR)
            continue;
        if (n <= 0) { /* it has become shorter: what was promised comes all the same */
            n = size < sizeof content ? (long)size : (long)sizeof content;
            memset(content, 0, (size_t)n);
        }
        if ((size_t)n < PATH_BYTES)
            put(content, (size_t)n);
        else {
            put_all(said, said_size);
            said_size = 0;
            put_all(content, (size_t)n);
        }
        size -= (u64)n;
    }
}

static bool pack(const char *name)
{
    static char target[PATH_BYTES];
    struct statx found;
    long fd = open_below(name, O_PATH);
    if (fd < 0)
        return fd == -ENOENT || fd == -ENOTDIR || fd == -ELOOP;
    SYS(statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &found);
    u32 kind = found.stx_mode & S_IFMT;
    struct packed head = {.seconds = found.stx_mtime.tv_sec, .mode = found.stx_mode, .name = (u16)length_of(name)};
    if (kind == S_IFLNK) {
        long n = SYS(readlinkat, fd, "", target, sizeof target);
        head.target = (u16)(n > 0 ? n : 0);
    }
    SYS(close, fd);
    long file = -1;
    if (kind == S_IFREG) {
        file = open_below(name, O_RDONLY | O_NONBLOCK);
        if (file < 0 || SYS(statx, file, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &found) ||
            (found.stx_mode & S_IFMT) != S_IFREG)
            return false;
        head.size = found.stx_size;
        head.mode = found.stx_mode;
    }
    put(&head, sizeof head);
    put(name, head.name);
    put(target, head.target);
    if (file >= 0) {
        pack_content((int)file, head.size);
        SYS(close, file);
    }
    return true;
}

static int show(const char *path, u64 most)
{
    static char root[PATH_BYTES + 1], name[2 * PATH_BYTES], link[32];
    struct statx found;
    long size = SYS(getcwd, root, PATH_BYTES);
    long fd = SYS(openat, AT_FDCWD, path, O_PATH | O_CLOEXEC);
    if (size < 0 || fd < 0)
        return fd == -ENOENT || fd == -ENOTDIR || fd == -ELOOP || fd == -EACCES || fd == -ENAMETOOLONG ? 71 : 1;
    root[size - 1] = '/';
    join(link, "/proc/self/fd/", (u32)fd, "");
    if (SYS(readlinkat, AT_FDCWD, link, name, sizeof name) < size || !same(root, name, (size_t)size))
        return 72;
    if (!SYS(statx, fd, "", AT_EMPTY_PATH, STATX_TYPE, &found) && (found.stx_mode & S_IFMT) != S_IFREG)
        return 73;
    long file = SYS(openat, AT_FDCWD, link, O_RDONLY | O_NONBLOCK | O_CLOEXEC), n = 1;
    if (file < 0) {
        SYS(write, 2, "it cannot be opened", 19);
        return 1;
    }
    size_t held = 2;
    memcpy(said, "f\n", held);
    while (most && n) {
        n = SYS(read, file, said + held, most < FULL - held ? most : FULL - held);
        if (n == -EINTR)
            continue;
        if (n < 0)
            return 1;
        held += (size_t)n;
        most -= (u64)n;
        if (held == FULL || !most || !n) {
            put_all(said, held);
            held = 0;
        }
    }
    return 0;
}

static bool remove_one(const char *name)
{
    static char above[PATH_BYTES];
    size_t length = length_of(name), last = length;
    while (last && name[last - 1] != '/')
        last--;
    memcpy(above, name, last);
    above[last ? last - 1 : 0] = 0;
    long directory = open_below(above, O_PATH | O_DIRECTORY);
    if (directory < 0)
        return directory == -ENOENT || directory == -ENOTDIR || directory == -ELOOP;
    long error = SYS(unlinkat, directory, name + last, 0);
    if (error == -EISDIR)
        error = SYS(unlinkat, directory, name + last, AT_REMOVEDIR);
    SYS(close, directory);
    return !error || error == -ENOENT || error == -ENOTDIR || error == -ENOTEMPTY;
}

/* Do something for each path that is read, below `root`. */
static int each_file(const char *root, bool (*act)(const char *name))
{
    static char names[1 << 16];
    size_t held = 0;
    top = (int)SYS(openat, AT_FDCWD, root, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (top < 0)
        return 1;
    for (;;) {
        long n = SYS(read, 0, names + held, sizeof names - held);
        if (n == -EINTR)
            continue;
        if (n <= 0)
            break;
        size_t at = 0, whole = held += (size_t)n;
        while (whole && names[whole - 1])
            whole--;
        for (; at < whole; at += length_of(names + at) + 1)
            if (!names[at]) /* the end, for whoever cannot close what we read */
                goto done;
            else if (!act(names + at))
                return 1;
        held -= whole;
        for (size_t i = 0; i < held; i++)
            names[i] = names[whole + i];
        if (held >= PATH_BYTES)
            return 1;
    }
done:
    put_all(said, said_size);
    return 0;
}
