/* The guest's part in a pod, whose containers share directories and a network but no process.
 *
 * `guest wait` is the first process of a container that only carries files: it ends with SIGTERM. What else runs there
 * is started by the API server: `guest unpack ROOT [then]` makes files of what `guest pack` or the host writes, up to a
 * record without a name, and with `then` ends the container; `guest cached DIR DIGEST ROOT` does so with the file of DIR
 * that has this SHA-256 as its name, and ends with 7 when there is none; `guest keep DIR DIGEST ROOT` unpacks its input
 * and makes that file of it, and ends with 8 when it cannot; `guest open ROOT...` lets its user read everything below;
 * `guest bridge PATH` gives the guest that dials PATH its standard input and output as the channel, in place of an
 * earlier bridge; `guest end PATH` ends that guest and everything else here; `guest reach ADDRESS...` says with 1 that
 * something answers, at an address in hexadecimal digits or where the cluster's API is for pods.
 */
enum { BRIDGED = 1 << 18, PATIENCE = 30000, REACHED_MS = 1000, CALLS = 3, TARGETS = 16, LEFT_SECONDS = 600 };

static int wait_for_end(void)
{
    u64 wanted = 1ull << (SIGTERM - 1) | 1ull << (SIGCHLD - 1);
    SYS(rt_sigprocmask, SIG_BLOCK, &every_signal, 0, 8);
    while (SYS(rt_sigtimedwait, &wanted, 0, 0, 8) != SIGTERM)
        while (SYS(wait4, -1, 0, WNOHANG, 0) > 0)
            ;
    for (int i = 0; i < 50 && SYS(kill, -1, 0) == 0; i++) { /* what runs here tells its end before it goes with us */
        struct { long seconds, nanoseconds; } pause = {0, 10000000};
        SYS(ppoll, 0, 0, &pause, 0, 8);
    }
    return 0;
}

/* A new bridge ends earlier ones with SIGHUP, and those that carry files stay. */
static void ignore_hangup(void)
{
    struct { long handler, flags, restorer; u64 mask; } ignore = {.handler = 1};
    SYS(rt_sigaction, SIGHUP, &ignore, 0, 8);
}

/* --- unpack --- */

/* The cache that is used: `file` of it is written with what is read, or `digest` is what is read. */
static struct {
    int directory, file;
    const char *digest;
    bool emptied;
    struct sha256 read;
} cache = {.directory = -1, .file = -1};

/* Make room by removing everything: what others read just now stays for them. */
static void empty_cache(void)
{
    static char entries[1 << 14];
    SYS(lseek, cache.directory, 0, 0);
    for (long size; (size = SYS(getdents64, cache.directory, entries, sizeof entries)) > 0;)
        for (long at = 0; at < size;) {
            const struct entry *found = (const struct entry *)(entries + at);
            if (length_of(found->name) == DIGEST_LETTERS)
                SYS(unlinkat, cache.directory, found->name, 0);
            at += found->length;
        }
    cache.emptied = true;
}

static void write_cache(const u8 *at, size_t size)
{
    while (size) {
        long n = SYS(write, cache.file, at, size);
        if ((n == -ENOSPC || n == -EDQUOT) && !cache.emptied)
            empty_cache();
        else if (n <= 0 && n != -EINTR) {
            SYS(close, cache.file);
            cache.file = -1;
            return;
        }
        at += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
}

static int refuse_cached(void)
{
    SYS(unlinkat, cache.directory, cache.digest, 0);
    return 9;
}

static void get_all(void *to, size_t size)
{
    u8 *at = to;
    while (size) {
        long n = SYS(read, 0, at, size);
        if (n == -EINTR)
            continue;
        if (n <= 0)
            quit(cache.digest ? refuse_cached() : 4); /* else the host has gone */
        if (cache.directory >= 0)
            add_sha256(&cache.read, at, (size_t)n);
        if (cache.file >= 0)
            write_cache(at, (size_t)n);
        at += n;
        size -= (size_t)n;
    }
}

static void keep_content(int file, u64 size)
{
    static u8 content[1 << 16];
    while (size) {
        size_t part = size < sizeof content ? (size_t)size : sizeof content;
        get_all(content, part);
        for (size_t at = 0; at < part;) {
            long n = SYS(write, file, content + at, part - at);
            if (n < 0 && n != -EINTR)
                quit(n == -ENOSPC || n == -EDQUOT ? 5 : 6);
            at += n > 0 ? (size_t)n : 0;
        }
        size -= part;
    }
}

/* The directory of an entry, opened through no link; `last` is the entry's name in it. */
static int open_parent(char *name, char **last)
{
    char *slash = NULL;
    for (char *at = name; *at; at++)
        if (*at == '/')
            slash = at;
    *last = slash ? slash + 1 : name;
    if (slash)
        *slash = 0;
    int parent = (int)open_below(slash ? name : "", O_PATH | O_DIRECTORY);
    if (slash)
        *slash = '/';
    return parent;
}

/* What stands for a protected path is mounted elsewhere already, so it is filled and not replaced. */
static long open_placeholder(int parent, const char *name)
{
    struct statx found;
    if (SYS(statx, parent, name, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, &found) ||
        (found.stx_mode & S_IFMT) != S_IFREG || !is_placeholder(&found))
        return -ENOENT;
    SYS(fchmodat, parent, name, 0600);
    return SYS(openat, parent, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
}

static void unpack(const struct packed *head, char *name, char *target)
{
    char *last;
    int parent = open_parent(name, &last);
    struct { int64_t seconds, nanoseconds; } times[2] = {{head->seconds, 0}, {head->seconds, 0}};
    u32 kind = head->mode & S_IFMT;
    long done = parent;
    if (parent >= 0 && kind == S_IFDIR) {
        done = SYS(mkdirat, parent, last, 0700);
        if (done == -EEXIST)
            done = 0;
    } else if (parent >= 0 && (kind != S_IFREG || (done = open_placeholder(parent, last)) < 0)) {
        SYS(unlinkat, parent, last, 0);
        if (kind == S_IFLNK)
            done = SYS(symlinkat, target, parent, last);
        else if (kind == S_IFIFO)
            done = SYS(mknodat, parent, last, S_IFIFO | 0600, 0);
        else
            done = SYS(openat, parent, last, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    }
    if (done < 0)
        quit(done == -ENOSPC || done == -EDQUOT ? 5 : 6);
    if (kind == S_IFREG) {
        keep_content((int)done, head->size);
        SYS(close, done);
    }
    if (kind != S_IFLNK)
        SYS(fchmodat, parent, last, head->mode & 07777);
    SYS(utimensat, parent, last, times, AT_SYMLINK_NOFOLLOW);
    SYS(close, parent);
}

static int unpack_files(const char *root, bool then)
{
    static char name[PATH_BYTES + 1], target[PATH_BYTES + 1];
    ignore_hangup();
    top = (int)SYS(openat, AT_FDCWD, root, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (top < 0)
        return 6;
    for (;;) {
        struct packed head;
        get_all(&head, sizeof head);
        if (!head.name)
            break;
        if (head.name > PATH_BYTES || head.target > PATH_BYTES)
            return 6;
        get_all(name, head.name);
        get_all(target, head.target);
        name[head.name] = target[head.target] = 0;
        unpack(&head, name, target);
    }
    if (then)
        SYS(kill, 1, SIGTERM);
    return 0;
}

/* --- the cache --- */

static bool has_read(const char *digest)
{
    char found[DIGEST_LETTERS];
    end_sha256(&cache.read, found);
    return same(found, digest, DIGEST_LETTERS);
}

/* Whoever else can write there may have changed the file, which is not taken then. */
static int unpack_cached(const char *digest, const char *root)
{
    int file = (int)SYS(openat, cache.directory, digest, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0 || SYS(dup3, file, 0, 0) < 0)
        return 7;
    cache.digest = digest;
    return unpack_files(root, false) || !has_read(digest) ? refuse_cached() : 0;
}

/* Somebody else may write the same just now; who was killed while doing so has left it. */
static int open_part(const char *part)
{
    struct statx found;
    struct { long seconds, nanoseconds; } now;
    SYS(clock_gettime, 0, &now);
    if (SYS(statx, cache.directory, part, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &found) == 0 &&
        found.stx_mtime.tv_sec < now.seconds - LEFT_SECONDS)
        SYS(unlinkat, cache.directory, part, 0);
    return (int)SYS(openat, cache.directory, part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
}

static int keep(const char *digest, const char *root)
{
    char part[DIGEST_LETTERS + sizeof ".part"];
    memcpy(part, digest, DIGEST_LETTERS);
    memcpy(part + DIGEST_LETTERS, ".part", sizeof ".part");
    int begun = cache.file = open_part(part), code = unpack_files(root, false);
    if (begun == -EEXIST)
        return code;
    bool kept = code == 0 && cache.file >= 0 && has_read(digest) && SYS(fsync, cache.file) == 0 &&
                SYS(renameat2, cache.directory, part, cache.directory, digest, 0) == 0;
    if (begun >= 0 && !kept)
        SYS(unlinkat, cache.directory, part, 0);
    return code ? code : kept ? 0 : 8;
}

static int use_cache(bool keeps, const char *place, const char *digest, const char *root)
{
    if (length_of(digest) != DIGEST_LETTERS)
        return 6;
    begin_sha256(&cache.read);
    cache.directory = (int)SYS(openat, AT_FDCWD, place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return keeps ? keep(digest, root) : unpack_cached(digest, root);
}

/* --- open --- */

static int open_trees(int count, char **roots)
{
    char *waiting = map_pages(WAITING);
    opens = true;
    for (int i = 0; waiting && i < count; i++)
        list_tree(roots[i], waiting, NULL, 0);
    return !waiting;
}

/* --- room --- */

/* Tell the size of the file system that a directory is on, in bytes, and its device. */
static int tell_room(const char *root)
{
    struct statfs whole;
    struct statx found;
    if (SYS(statfs, root, &whole) < 0 || SYS(statx, AT_FDCWD, root, 0, STATX_TYPE, &found) < 0)
        return 6;
    struct { u64 bytes; u32 major, minor; } told = {
        (u64)whole.f_blocks * (u64)whole.f_frsize, found.stx_dev_major, found.stx_dev_minor,
    };
    return SYS(write, 1, &told, sizeof told) != sizeof told;
}

/* --- the channel --- */

static int address_of(const char *path, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    if (length_of(path) + 2 >= sizeof address->sun_path)
        return -1;
    memcpy(address->sun_path, path, length_of(path));
    return (int)SYS(socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

struct way {
    u8 *held;
    size_t got, sent;
    int from, to;
    bool ended;
};

static bool move_on(struct way *way, bool readable)
{
    if (readable && way->got < BRIDGED) {
        long n = SYS(read, way->from, way->held + way->got, BRIDGED - way->got);
        if (n == 0 || (n < 0 && n != -EAGAIN && n != -EINTR))
            way->ended = true;
        way->got += n > 0 ? (size_t)n : 0;
    }
    if (way->sent < way->got) {
        long n = SYS(write, way->to, way->held + way->sent, way->got - way->sent);
        if (n < 0 && n != -EAGAIN && n != -EINTR)
            return false;
        way->sent += n > 0 ? (size_t)n : 0;
    }
    if (way->got == way->sent) /* before the next wait: a full buffer is not waited for */
        way->got = way->sent = 0;
    return !(way->ended && way->sent == way->got);
}

struct polled { int fd; int16_t wanted, found; };
enum { READABLE = 1, WRITABLE = 4, BROKEN = 8 | 16 };

static int bridge(const char *path)
{
    struct sockaddr_un address, part;
    struct { long seconds, nanoseconds; } patience = {PATIENCE / 1000, 0};
    int fd = address_of(path, &address), number = (int)SYS(getpid, 0);
    if (!SYS(getuid, 0)) /* in no pod of ours, and its signals would reach everybody */
        return 6;
    ignore_hangup();
    SYS(kill, -1, SIGHUP);
    part = address;
    join(part.sun_path, path, (u32)number, "");
    SYS(unlinkat, AT_FDCWD, part.sun_path, 0);
    if (fd < 0 || SYS(bind, fd, &part, sizeof part) < 0 || SYS(listen, fd, 1) < 0 ||
        SYS(renameat2, AT_FDCWD, part.sun_path, AT_FDCWD, path, 0) < 0)
        return 6;
    struct polled waiting = {fd, READABLE, 0};
    long ready = SYS(ppoll, &waiting, 1, &patience, 0, 8);
    int guest = ready > 0 ? (int)SYS(accept4, fd, 0, 0, SOCK_CLOEXEC) : -1;
    SYS(unlinkat, AT_FDCWD, path, 0); /* before we end: a guest that finds nobody behind it would end, too */
    SYS(close, fd);
    if (guest < 0)
        return 7;
    struct { long handler, flags, restorer; u64 mask; } default_action = {0};
    SYS(rt_sigaction, SIGHUP, &default_action, 0, 8);
    struct way in = {map_pages(BRIDGED), 0, 0, 0, guest, false}, out = {map_pages(BRIDGED), 0, 0, guest, 1, false};
    if (!in.held || !out.held)
        return 2;
    SYS(fcntl, guest, F_SETFL, O_RDWR | O_NONBLOCK);
    SYS(fcntl, 0, F_SETFL, O_RDWR | O_NONBLOCK);
    SYS(fcntl, 1, F_SETFL, O_RDWR | O_NONBLOCK);
    for (;;) {
        int16_t wanted = (int16_t)((out.got < BRIDGED ? READABLE : 0) | (in.sent < in.got ? WRITABLE : 0));
        struct polled on[3] = {
            {in.got < BRIDGED && !in.ended ? 0 : -1, READABLE, 0},
            {wanted && !out.ended ? guest : -1, wanted, 0},
            {out.sent < out.got ? 1 : -1, WRITABLE, 0},
        };
        SYS(ppoll, on, 3, 0, 0, 8);
        if (!move_on(&in, on[0].found & (READABLE | BROKEN)) || !move_on(&out, on[1].found & (READABLE | BROKEN)))
            return 0;
    }
}

/* A socket that nobody listens on tells the guest that it is not wanted any more. */
static int end_guest(const char *path)
{
    struct sockaddr_un address;
    int fd = address_of(path, &address);
    if (!SYS(getuid, 0))
        return 6;
    SYS(unlinkat, AT_FDCWD, path, 0);
    long bound = fd < 0 ? fd : SYS(bind, fd, &address, sizeof address);
    SYS(kill, -1, SIGKILL);
    return bound < 0 ? 6 : 0;
}

/* --- the network --- */

static int begin_to_reach(const void *address, u32 size)
{
    u16 family;
    memcpy(&family, address, sizeof family);
    int fd = (int)SYS(socket, family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    long done = fd < 0 ? fd : SYS(connect, fd, address, size);
    if (done == 0 || done == -EINPROGRESS)
        return fd;
    SYS(close, fd);
    return -1;
}

static int digit(char letter)
{
    return letter >= 'a' ? letter - 'a' + 10 : letter - '0';
}

static const char *value_of(char **env, const char *name)
{
    size_t length = length_of(name);
    for (; *env; env++)
        if (length_of(*env) > length && same(*env, name, length) && (*env)[length] == '=')
            return *env + length + 1;
    return NULL;
}

/* Where the cluster's API is for pods, as the environment of every container says it; IPv4 only. */
static bool find_api(char **env, struct sockaddr_in *address)
{
    const char *host = value_of(env, "KUBERNETES_SERVICE_HOST"), *port = value_of(env, "KUBERNETES_SERVICE_PORT");
    u8 *bytes = (u8 *)&address->sin_addr.s_addr;
    if (!host || !port)
        return false;
    for (int i = 0, number = 0; i < 4; host++) {
        if (*host >= '0' && *host <= '9')
            number = number * 10 + (*host - '0');
        else if (*host == '.' || !*host) {
            bytes[i++] = (u8)number;
            number = 0;
            if (!*host)
                break;
        } else
            return false;
    }
    u64 number = number_of(port);
    address->sin_family = AF_INET;
    address->sin_port = (u16)((number >> 8 & 0xff) | number << 8);
    return true;
}

/* Each address is called three times, a third of the time apart, for one packet may get lost. */
static int reach(int count, char **words, char **env)
{
    struct { u8 bytes[128]; u32 size; } targets[TARGETS];
    struct polled on[TARGETS * CALLS];
    struct sockaddr_in api = {0};
    int known = 0, called = 0;
    for (; known < count && known < TARGETS - 1; known++) {
        size_t size = length_of(words[known]) / 2;
        if (size > sizeof targets[0].bytes)
            return 6;
        for (size_t at = 0; at < size; at++)
            targets[known].bytes[at] = (u8)(digit(words[known][2 * at]) << 4 | digit(words[known][2 * at + 1]));
        targets[known].size = (u32)size;
    }
    if (find_api(env, &api)) {
        memcpy(targets[known].bytes, &api, sizeof api);
        targets[known++].size = sizeof api;
    }
    long begun = now_ms();
    for (int call = 1; call <= CALLS; call++) {
        for (int i = 0; i < known; i++)
            on[called++] = (struct polled){begin_to_reach(targets[i].bytes, targets[i].size), WRITABLE, 0};
        for (long left, until = begun + call * REACHED_MS / CALLS; (left = until - now_ms()) > 0;) {
            struct { long seconds, nanoseconds; } patience = {left / 1000, left % 1000 * 1000000};
            if (SYS(ppoll, on, called, &patience, 0, 8) <= 0)
                break;
            for (int i = 0; i < called; i++) {
                int error = 0;
                u32 size = sizeof error;
                if (!on[i].found || on[i].fd < 0)
                    continue;
                if (SYS(getsockopt, on[i].fd, SOL_SOCKET, SO_ERROR, &error, &size) >= 0 && !error)
                    return 1;
                SYS(close, on[i].fd);
                on[i].fd = -1;
            }
        }
    }
    return 0;
}

/* The word of a pod that the guest is started with; -1 for any other. */
static int serve_pod(int argc, char **argv, char **env)
{
    const char *word = argv[1];
    size_t length = length_of(word) + 1;
    if (length == 5 && same(word, "wait", 5))
        return wait_for_end();
    if (length == 7 && same(word, "unpack", 7) && argc > 2)
        return unpack_files(argv[2], argc > 3);
    if (((length == 5 && same(word, "keep", 5)) || (length == 7 && same(word, "cached", 7))) && argc == 5)
        return use_cache(length == 5, argv[2], argv[3], argv[4]);
    if (length == 5 && same(word, "room", 5) && argc == 3)
        return tell_room(argv[2]);
    if (length == 5 && same(word, "open", 5))
        return open_trees(argc - 2, argv + 2);
    if (length == 7 && same(word, "bridge", 7) && argc == 3)
        return bridge(argv[2]);
    if (length == 4 && same(word, "end", 4) && argc == 3)
        return end_guest(argv[2]);
    if (length == 6 && same(word, "reach", 6))
        return reach(argc - 2, argv + 2, env);
    return -1;
}
