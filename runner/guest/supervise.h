/* The supervisor of one command: it owns the command's process tree, and nothing else.
 *
 * It is a subreaper, so whatever the tree loses as a parent becomes its child. Killing its direct children again
 * and again until there are none ends every tree that does not fork faster; one that does is killed as a whole.
 * A kernel may know no subreapers: there each tree has a group of its own, which only root could leave, as its mark.
 * When the guest closes its end of the control socket, or the half towards us, it does that and ends. It cannot be
 * dumped or traced, and the command's signals do not reach it where Landlock can scope them.
 */

enum { NONE, REQUEST, FORK, LIMITS, DIRECTORY, EXEC, LISTENING }; /* stages */
enum { KEEP = 0xffffffff };

struct report { /* supervisor to guest */
    u8 what;    /* 'P'id, 'F'ailed, e'X'ited, exited as the 'L'ast, 'G'one */
    u8 stage;
    u16 zero;
    i32 value;
};

struct request { /* as framing.py packs it; limits and words follow */
    u32 uid, gid;
    i32 oom_score_adj;
    u32 limits, words, variables;
};

struct wanted_limit {
    u32 number, zero;
    u64 soft, hard;
};

struct shield {
    bool init, signals, calls;
    bool marks; /* of trees, for want of subreapers: not said to the host */
    struct rlimit files; /* what commands get, though the guest itself raised it */
};

static const u64 every_signal = ~0ull;

static void tell(int control, char what, u8 stage, long value)
{
    struct report report = {.what = (u8)what, .stage = stage, .value = (i32)value};
    SYS(sendto, control, &report, sizeof report, MSG_NOSIGNAL);
}

static void refuse(int control, u8 stage, long error)
{
    tell(control, 'F', stage, -error);
    quit(1);
}

/* --- who is where in the process tree --- */

typedef void visit(u32 number, void *context);

static u32 number_at(const char *text)
{
    u32 number = 0;
    for (; *text >= '0' && *text <= '9'; text++)
        number = number * 10 + (u32)(*text - '0');
    return number;
}

/* The parent of a process by its stat file; 0 when it is gone. */
static u32 parent_of(u32 pid)
{
    char path[40], text[512];
    join(path, "/proc/", pid, "/stat");
    int fd = (int)SYS(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    long n = SYS(read, fd, text, sizeof text);
    SYS(close, fd);
    while (n > 0 && text[n - 1] != ')') /* a command's name may hold anything, brackets too */
        n--;
    u32 parent = 0;
    for (long at = n + 3; n > 0 && at < (long)sizeof text && text[at] >= '0' && text[at] <= '9'; at++)
        parent = parent * 10 + (u32)(text[at] - '0');
    return n > 0 ? parent : 0;
}

/* Every entry of a directory of `/proc` that is a number. False where there is no such directory. */
static bool each_number(const char *directory, visit *visit, void *context)
{
    struct entry {
        u64 inode, offset;
        u16 length;
        u8 type;
        char name[];
    } *entry;
    _Alignas(8) char buffer[4096];
    int fd = (int)SYS(openat, AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return false;
    for (long n; (n = SYS(getdents64, fd, buffer, sizeof buffer)) > 0;)
        for (long at = 0; at < n; at += entry->length) {
            entry = (struct entry *)(buffer + at);
            u32 number = number_at(entry->name);
            if (number)
                visit(number, context);
        }
    SYS(close, fd);
    return true;
}

static void close_above(u32 fd, void *kept)
{
    if (fd > *(u32 *)kept)
        SYS(close, fd);
}

/* All descriptors from this one, below which all are open. */
static void close_from(u32 first)
{
    if (SYS(close_range, first, ~0u, 0) >= 0)
        return;
    SYS(close, first); /* it becomes that of the directory, which is closed last */
    if (!each_number("/proc/self/fd", close_above, &first))
        for (u32 fd = first; fd < 65536; fd++)
            SYS(close, fd);
}

static void visit_if_ours(u32 pid, void *context)
{
    if (parent_of(pid) == (u32)SYS(getpid, 0))
        ((visit *)context)(pid, NULL);
}

/* Our direct children. A child of ours cannot be another's by the time that we signal it: we have not reaped it. */
static void each_child(visit *visit)
{
    char buffer[4096];
    u32 pid = 0;
    int fd = (int)SYS(openat, AT_FDCWD, "/proc/thread-self/children", O_RDONLY | O_CLOEXEC);
    if (fd < 0) { /* a kernel without it */
        each_number("/proc", visit_if_ours, (void *)visit);
        return;
    }
    for (long n; (n = SYS(read, fd, buffer, sizeof buffer)) > 0;)
        for (long at = 0; at < n; at++)
            if (buffer[at] >= '0' && buffer[at] <= '9')
                pid = pid * 10 + (u32)(buffer[at] - '0');
            else if (pid) {
                visit(pid, NULL);
                pid = 0;
            }
    SYS(close, fd);
}

static void kill_child(u32 pid, void *context)
{
    (void)context;
    SYS(kill, pid, SIGKILL);
}

static u32 mark; /* of our tree, and of us; 0 where we are a subreaper */

struct search {
    u32 signal, found;
};

/* Whether a process, which is not a zombie, has the mark among its groups. */
static bool is_marked(u32 pid)
{
    char path[40], text[1024];
    join(path, "/proc/", pid, "/status");
    int fd = (int)SYS(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    long n = SYS(read, fd, text, sizeof text - 1);
    SYS(close, fd);
    text[n > 0 ? n : 0] = 0;
    bool alive = false, found = false;
    for (char *line = text; *line;) {
        bool groups = same(line, "Groups:", 7); /* the lines that matter come early, and the buffer is larger */
        alive |= same(line, "State:\t", 7) && line[7] != 'Z';
        for (; *line && *line != '\n'; line++)
            found |= groups && (line[-1] == ' ' || line[-1] == '\t') && number_at(line) == mark;
        line += *line == '\n';
    }
    return alive && found;
}

static void signal_marked(u32 pid, void *context)
{
    struct search *search = context;
    if (pid == (u32)SYS(getpid, 0) || !is_marked(pid))
        return;
    search->found++;
    if (search->signal)
        SYS(kill, pid, search->signal);
    /* At once those that would be forked anew meanwhile. A group of its session is a group of the tree, ours is not. */
    long group = search->signal == SIGKILL ? SYS(getpgid, pid) : 0;
    if (group > 1 && group != SYS(getpgid, 0))
        SYS(kill, -group, SIGKILL);
}

static u32 signal_all_marked(u32 signal)
{
    struct search search = {.signal = signal};
    each_number("/proc", signal_marked, &search);
    return search.found;
}

struct family {
    u32 count;
    u32 members[8192]; /* us first, then descendants, nearest first */
};

static bool is_member(struct family *family, u32 pid)
{
    for (u32 i = 0; i < family->count; i++)
        if (family->members[i] == pid)
            return true;
    return false;
}

static void add_member(u32 pid, void *context)
{
    struct family *family = context;
    if (family->count == sizeof family->members / sizeof *family->members)
        return;
    if (is_member(family, parent_of(pid)) && !is_member(family, pid))
        family->members[family->count++] = pid;
}

static void signal_member(struct family *family, u32 pid, u32 signal)
{
    int fd = (int)SYS(pidfd_open, pid, 0);
    if (fd == -ENOSYS)
        SYS(kill, pid, signal);
    if (fd < 0)
        return;
    if (is_member(family, parent_of(pid))) /* asked again now that the pid cannot become another's */
        SYS(pidfd_send_signal, fd, signal, 0, 0);
    SYS(close, fd);
}

/* Every process that the tree has now, once. What one of them starts as its answer is left alone, for it may be saving
 * work. So one that is forked meanwhile may be missed, which is why KILL does not rely on it. */
static void signal_tree(u32 signal)
{
    static struct family family;
    if (mark) {
        signal_all_marked(signal);
        return;
    }
    family.count = 1;
    family.members[0] = (u32)SYS(getpid, 0);
    for (u32 before = 0; before != family.count;) {
        before = family.count;
        each_number("/proc", add_member, &family);
    }
    for (u32 i = 1; i < family.count; i++)
        signal_member(&family, family.members[i], signal);
}

/* --- becoming the command --- */

#define LOAD(at) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at)
#define SKIP_IF(value, count) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, count, 0)
#define SKIP_UNLESS(value, count) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, count)
#define ANSWER(action) BPF_STMT(BPF_RET | BPF_K, action)
#define REFUSE(error) ANSWER(SECCOMP_RET_ERRNO | (error))
#define CLOSE(name) SKIP_UNLESS(__NR_##name, 1), REFUSE(ENOSYS)

/* For what comes of us, and cannot be undone. Closed is what reaches beyond the namespaces of a sandbox or asks much of
 * the host's kernel: sockets of other families than Unix, internet and netlink's routes, among them those that reach
 * the machine around a virtual one; io_uring, which makes sockets of any family; keys, which are those of whoever
 * started the runner; programs in the kernel, its counters and its log; page faults. To programs it is a kernel without
 * them. The limits of other processes cannot be set, only read (no new value), and one's own (pid 0). Calls by the
 * numbers of another architecture are not judged: the one ends whoever makes them, x32's are not there.
 * Once for all commands, for making a filter costs more than the rest of a command's start. */
static bool keep_calls(void)
{
    enum { NUMBER = 0, ARCHITECTURE = 4, FIRST = 16, SECOND = 24, THIRD = 32 };
    enum { X32 = 0x40000000, TYPE = 0xf };
    struct sock_filter code[] = {
        LOAD(ARCHITECTURE),
        SKIP_IF(AUDIT_NATIVE, 1),
        ANSWER(SECCOMP_RET_KILL_PROCESS),
        LOAD(NUMBER),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, X32, 0, 1),
        REFUSE(ENOSYS),
        CLOSE(io_uring_setup),
        CLOSE(io_uring_enter),
        CLOSE(io_uring_register),
        CLOSE(add_key),
        CLOSE(request_key),
        CLOSE(keyctl),
        CLOSE(bpf),
        CLOSE(perf_event_open),
        CLOSE(syslog),
        CLOSE(userfaultfd),
        SKIP_UNLESS(__NR_prlimit64, 8),
        LOAD(FIRST),
        SKIP_IF(0, 4),
        LOAD(THIRD),
        SKIP_UNLESS(0, 3),
        LOAD(THIRD + 4),
        SKIP_UNLESS(0, 1),
        ANSWER(SECCOMP_RET_ALLOW),
        REFUSE(EPERM),
        SKIP_IF(__NR_socket, 2),
        SKIP_IF(__NR_socketpair, 1),
        ANSWER(SECCOMP_RET_ALLOW),
        LOAD(FIRST),
        SKIP_IF(AF_UNIX, 8),
        SKIP_IF(AF_INET6, 7),
        SKIP_IF(AF_INET, 3),
        SKIP_UNLESS(AF_NETLINK, 6),
        LOAD(THIRD),
        SKIP_UNLESS(0 /* NETLINK_ROUTE */, 5),
        LOAD(SECOND),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, TYPE),
        SKIP_IF(SOCK_PACKET, 1), /* an old name for a socket of family AF_PACKET */
        ANSWER(SECCOMP_RET_ALLOW),
        REFUSE(EAFNOSUPPORT),
        REFUSE(EPROTONOSUPPORT),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return SYS(seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program) >= 0
        || SYS(seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) >= 0; /* a kernel that knows no flags */
}

/* Tried, whoever it is that refuses. */
static bool are_calls_closed(void)
{
    int pair[2];
    return SYS(socket, AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0) == -EAFNOSUPPORT
        && SYS(socketpair, AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == -EAFNOSUPPORT
        && SYS(socket, AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 16 /* NETLINK_GENERIC */) == -EPROTONOSUPPORT
        && SYS(io_uring_setup, 1, 0) == -ENOSYS && SYS(keyctl, 0, -4, 0) == -ENOSYS && SYS(bpf, 0, 0, 0) == -ENOSYS
        && SYS(perf_event_open, 0, 0, -1, -1, 0) == -ENOSYS && SYS(userfaultfd, 1) == -ENOSYS
        && SYS(syslog, 10 /* its size */) == -ENOSYS;
}

/* For the command: its signals reach nobody but its own tree. */
static long keep_signals(void)
{
    struct { u64 files, network, scoped; } domain = {.scoped = 2 /* LANDLOCK_SCOPE_SIGNAL */};
    int fd = (int)SYS(landlock_create_ruleset, &domain, sizeof domain, 0);
    long result = fd < 0 ? fd : SYS(landlock_restrict_self, fd, 0);
    SYS(close, fd);
    return result;
}

static long write_text(const char *path, const char *text)
{
    int fd = (int)SYS(openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return fd;
    long n = SYS(write, fd, text, length_of(text));
    SYS(close, fd);
    return n < 0 ? n : 0;
}

static long try_program(const char *path, char **argv, char **env)
{
    long error = SYS(execve, path, argv, env);
    if (error != -ENOEXEC)
        return error;
    u32 count = 0;
    while (argv[count])
        count++;
    char **shell = map_pages((count + 2) * sizeof *shell); /* a script without a first line, as every shell takes it */
    if (!shell)
        return -ENOMEM;
    shell[0] = "sh";
    shell[1] = (char *)path;
    for (u32 i = 1; i < count; i++)
        shell[i + 1] = argv[i];
    return SYS(execve, "/bin/sh", shell, env);
}

static long find_and_run(char **argv, char **env)
{
    const char *name = argv[0], *path = "/usr/local/bin:/usr/bin:/bin";
    for (const char *c = name; *c; c++)
        if (*c == '/')
            return try_program(name, argv, env);
    for (char **variable = env; *variable; variable++)
        if (length_of(*variable) >= 5 && same(*variable, "PATH=", 5))
            path = *variable + 5;
    long error = -ENOENT;
    for (char whole[4096]; *name;) {
        size_t n = 0, room = sizeof whole - 2;
        while (*path && *path != ':' && n < room)
            whole[n++] = *path++;
        if (!n)
            whole[n++] = '.';
        if (n + length_of(name) < room) {
            whole[n++] = '/';
            memcpy(whole + n, name, length_of(name) + 1);
            long result = try_program(whole, argv, env);
            if (result != -ENOENT && result != -ENOTDIR && result != -EACCES)
                return result;
            if (result == -EACCES)
                error = result;
        }
        while (*path && *path != ':')
            path++;
        if (!*path++)
            break;
    }
    return error;
}

/* Cut the words of a request, each ended by NUL, into cwd, argv and env. False if they are not exactly what it says. */
static bool cut(char *words, size_t size, const struct request *request, char **into)
{
    u64 count = 1ull + request->words + request->variables;
    char *end = words + size;
    if (!size || end[-1] || !request->words)
        return false;
    for (u64 i = 0; i < count; i++) {
        if (words == end)
            return false;
        into[i + (i > request->words)] = words; /* one place is left empty: the end of argv */
        words += length_of(words) + 1;
    }
    return words == end;
}

static void become(const struct request *request, size_t size, const struct shield *shield, int control)
{
    const struct wanted_limit *limit = (const void *)(request + 1);
    u64 fixed = sizeof *request + (u64)request->limits * sizeof *limit;
    if (size < sizeof *request || fixed > size || (u64)request->words + request->variables > size
        || request->oom_score_adj < 0)
        refuse(control, REQUEST, -EINVAL);
    char **words = map_pages(((u64)request->words + request->variables + 4) * sizeof *words);
    if (!words)
        refuse(control, FORK, -ENOMEM);
    if (!cut((char *)request + fixed, size - fixed, request, words))
        refuse(control, REQUEST, -EINVAL);
    char *cwd = words[0], **argv = words + 1, **env = argv + request->words + 1;

    tell(control, 'P', 0, SYS(getpid, 0)); /* by itself: so it comes before whatever this process brings about */
    SYS(setsid, 0);
    SYS(rt_sigprocmask, SIG_UNBLOCK, &every_signal, 0, 8);
    long error = SYS(prlimit64, 0, RLIMIT_NOFILE, &shield->files, 0);
    for (u32 i = 0; i < request->limits && error >= 0; i++)
        error = SYS(prlimit64, 0, limit[i].number, &limit[i].soft, 0);
    if (request->oom_score_adj > 0 && error >= 0) {
        char text[16];
        join(text, "", (u32)request->oom_score_adj, "");
        SYS(prctl, PR_SET_DUMPABLE, 1); /* else the file is root's; nothing of the guest is left in this copy of it */
        error = write_text("/proc/self/oom_score_adj", text);
    }
    if (request->gid != KEEP && error >= 0 && (error = SYS(setgroups, mark != 0, &mark)) >= 0)
        error = SYS(setresgid, request->gid, request->gid, request->gid);
    if (request->uid != KEEP && error >= 0) {
        for (long capability = 0; capability < 64; capability++)
            SYS(prctl, PR_CAPBSET_DROP, capability);
        error = SYS(setresuid, request->uid, request->uid, request->uid);
    }
    if (error < 0)
        refuse(control, LIMITS, error);
    if ((error = SYS(chdir, cwd)) < 0)
        refuse(control, DIRECTORY, error);
    if (shield->signals && (error = keep_signals()) < 0)
        refuse(control, LIMITS, error);
    refuse(control, EXEC, find_and_run(argv, env));
}

/* --- the supervisor's life --- */

enum { NOBODY, STRANGERS, OFFSPRING };

/* Who is left of the tree; of the end of strangers, who are no children of ours, we do not hear. A command that was the
 * last of its tree is told as one, so that nobody takes it for one that has left something behind. */
static int reap(int control, i32 command, int options)
{
    bool ended = false;
    for (int status, its = 0;;) {
        long pid = SYS(wait4, -1, &status, options, 0);
        if (pid == command) {
            ended = true;
            its = status;
        }
        if (pid > 0 && options & WNOHANG)
            continue;
        int left = pid >= 0 || pid == -EINTR ? OFFSPRING : mark && signal_all_marked(0) ? STRANGERS : NOBODY;
        if (ended)
            tell(control, left ? 'X' : 'L', 0, its);
        return left;
    }
}

/* Until nothing of the tree is left. It is ended once the other end of the control socket closes its half. */
static void watch_over(int control, i32 command, int reports)
{
    enum { IN = 1 /* POLLIN */, HANGUP = 0x2000 /* POLLRDHUP */, PATIENCE = 16 /* passes */ };
    struct { int fd; short events, returned; } ready[2] = {{control, IN | HANGUP, 0}, {reports, IN, 0}};
    struct { long seconds, nanoseconds; } look = {0, 20000000}, pause = {0, 2000000};
    bool ending = false;
    for (int passes = 0, left; (left = reap(control, command, WNOHANG)) != NOBODY;) {
        if (ending && mark) {
            signal_all_marked(SIGKILL);
            SYS(ppoll, 0, 0, &pause, 0, 8);
            continue;
        }
        if (ending) {
            each_child(kill_child);
            if (passes++ >= PATIENCE)
                signal_tree(SIGKILL);
            if (!reap(control, command, 0))
                break;
            continue;
        }
        SYS(ppoll, ready, 2, left == STRANGERS ? &look : 0, 0, 8);
        u32 signal;
        long heard = ready[0].returned ? SYS(recvfrom, control, &signal, sizeof signal, MSG_DONTWAIT) : -EAGAIN;
        if (ready[0].returned & HANGUP || !heard)
            ending = true; /* whatever else there is to hear */
        else if (heard == sizeof signal)
            signal_tree(signal);
        if (ready[1].returned) {
            u8 drained[128];
            SYS(read, reports, drained, sizeof drained);
        }
    }
    tell(control, 'G', 0, 0);
    quit(0);
}

static int hear_children(void)
{
    u64 child_signal = 1ull << (SIGCHLD - 1);
    SYS(prctl, PR_SET_CHILD_SUBREAPER, 1);
    SYS(rt_sigprocmask, SIG_BLOCK, &child_signal, 0, 8);
    return (int)SYS(signalfd4, -1, &child_signal, 8, O_CLOEXEC | O_NONBLOCK);
}

/* Descriptors 0 to 2 are the command's, 3 is the control socket; there are no others. */
static void supervise(const struct request *request, size_t size, const struct shield *shield, u32 id)
{
    enum { CONTROL = 3 };
    if (shield->marks) {
        mark = 1u << 31 | id;
        long error = SYS(setgroups, 1, &mark);
        if (error < 0)
            refuse(CONTROL, FORK, error);
    }
    int reports = hear_children();
    long command = reports < 0 ? reports : SYS(clone, SIGCHLD);
    if (command == 0)
        become(request, size, shield, CONTROL);
    if (command < 0)
        refuse(CONTROL, FORK, command);
    for (int fd = 0; fd < CONTROL; fd++)
        SYS(close, fd);
    watch_over(CONTROL, (i32)command, reports);
}

/* Run a program with our descriptors and end its tree with the control socket: for one that ties itself to the life of
 * its parent only when it has been running for a while. As another user if one is given, which is also his only group.
 */
static void guard(int control, const char *user, char **argv, char **env)
{
    if (*user != '-') {
        u64 id = number_of(user);
        if (SYS(setgroups, 0, 0) < 0 || SYS(setresgid, id, id, id) < 0 || SYS(setresuid, id, id, id) < 0)
            quit(1);
    }
    int reports = hear_children();
    long program = reports < 0 ? reports : SYS(clone, SIGCHLD);
    if (program == 0) {
        SYS(close, control);
        SYS(rt_sigprocmask, SIG_UNBLOCK, &every_signal, 0, 8);
        SYS(execve, argv[0], argv, env);
    }
    if (program <= 0)
        quit(1);
    SYS(dup3, control, 0, O_CLOEXEC);
    SYS(dup3, reports, 1, O_CLOEXEC);
    close_from(2);
    watch_over(0, (i32)program, 1);
}
