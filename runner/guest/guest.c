/* The guest: runs commands inside a workspace for the runner outside. framing.py says the protocol.
 *
 * One process, one epoll loop, no threads, no allocation but pages. It is started as the first process of the
 * workspace with the channel as descriptor 0 (`guest`) or as two, in 0 and out 1 (`guest -`), or dials a Unix socket
 * again and again (`guest PATH`), until nobody listens there any more. Each command has a supervisor (supervise.h) that
 * owns its process tree. Whatever comes from a command is bytes in a ring; whatever is to be said to the host is a flag
 * on a channel, composed when there is room: so nothing inside can make the guest's memory grow beyond the rings of the
 * commands that run.
 *
 *     cc -Os -static -nostdlib -ffreestanding -fno-stack-protector guest.c     (-DHOSTED: an ordinary program)
 */
#include "sys.h"

#include "supervise.h"

#include "files.h"

#include "sha256.h"

#include "pod.h"

enum { HELLO = 1, EXECUTE, DATA, END, ACK, SIGNAL, STATE, FORGET, LISTEN, OPEN, RESET, PING, PONG, READY, TYPES };
enum { UNBORN, RUNNING, EXITED, FAILED, GONE };
enum { TAMPERED = 1, UNKNOWN = 2, HANDED = 4 };
enum { MOMENT = 5, LONELY = 120000, UNUSED = 3600000 }; /* milliseconds */
enum { VERSION = 1, HEADER = 12, MAX_PAYLOAD = 1 << 16, WINDOW = 1 << 18, MAX_REQUEST = 4 << 20 };
enum { MAX_COMMANDS = 4096, MAX_RELAYED = 1024, SPARE_RINGS = 32, BUCKETS = 1024, BATCH = 64 };
static const u32 RELAY = 1u << 31;

enum { LINK, CHILDREN, LINK_OUT, CHANNELS }; /* what epoll tells of; channels by their addresses */
enum kind { COMMAND, LISTENER, RELAYED };
enum { STDIN, STDOUT, STDERR, CONTROL, PORTS };

struct port { /* a descriptor and what epoll watches on it */
    int fd;
    u32 watched;
};

struct in { /* towards the workspace: got from the host, put into the descriptor, told the host so */
    u8 *ring;
    u64 got, put, told;
    bool ended, closed; /* the host has sent the end; it was passed on, or nobody reads any more */
    bool broken;
};

struct out { /* from the workspace: got from the descriptor, sent and acknowledged by the host; the end counts one */
    u8 *ring;
    u64 got, sent, acked;
    u64 last; /* bytes that may still be read once the tree is gone */
    bool ended;
};

struct channel {
    struct channel *next;         /* of one bucket */
    struct channel *later;        /* of those with something to say; itself when last */
    u32 id;
    enum kind kind;
    bool says_state, says_open, says_in, says_reset, dead;
    bool hands; /* the host accepts the connections of a listener itself */
    struct port port[PORTS];
    struct in in;
    struct out out[2];
    u32 supervisor, listener;
    u8 phase, marks, stage;
    u32 pid, serial;
    i32 status;
};

struct frame {
    u32 length;
    u8 type, stream;
    u16 zero;
    u32 id;
};

static struct shield shield;
static u8 nonce[16], host_nonce[16];
static bool host_known;
static const char *dialled; /* where to; NULL for a channel that was inherited */
static long alone_since; /* when the place that is dialled was found to be none; 0 when it is one */
static bool is_used; /* has run a command */
static int loop, children, link = -1, link_out;
static int handing = -1; /* what the host gets with the next bytes of the link */
static bool link_full;
static bool heard_hello, heard_ready, says_ready, says_pong;
static u64 pong;

static struct channel *table[BUCKETS], *spare_channels;
static struct channel *first_to_say, **last_to_say = &first_to_say;
static long quiet_until; /* then all commands are asked for what they have to say; 0 when none waits */
static u32 commands, relayed, tampered, last_relay;
static bool accepting = true; /* there was room for a relayed connection when we last looked */
static u8 *spare_rings[SPARE_RINGS];
static u32 spare_ring_count;

enum { RECEIVED = HEADER + MAX_PAYLOAD + (1 << 16), OUTGOING = 2 * MAX_PAYLOAD + (1 << 16) };
static u8 *received;
static size_t received_size;
static u8 *outgoing;
static size_t outgoing_size, outgoing_sent;
static u8 *asked; /* the request that is being put together */
static size_t asked_size;
static u32 asked_id;

/* --- memory --- */

/* Pages that no supervisor gets: none sees what another command printed, and there is less to copy for each. */
static void *map_own_pages(size_t bytes)
{
    void *pages = map_pages(bytes);
    if (pages)
        SYS(madvise, pages, bytes, MADV_DONTFORK);
    return pages;
}

static u8 *take_ring(void)
{
    return spare_ring_count ? spare_rings[--spare_ring_count] : map_own_pages(WINDOW);
}

static void give_ring(u8 **ring)
{
    if (*ring && spare_ring_count < SPARE_RINGS)
        spare_rings[spare_ring_count++] = *ring;
    else if (*ring)
        SYS(munmap, *ring, WINDOW);
    *ring = NULL;
}

static struct channel *take_channel(u32 id, enum kind kind)
{
    struct channel *channel = spare_channels;
    if (!channel) {
        enum { BLOCK = 1 << 16 };
        u8 *block = map_own_pages(BLOCK);
        if (!block)
            return NULL;
        for (size_t at = 0; at + sizeof *channel <= BLOCK; at += sizeof *channel) {
            channel = (struct channel *)(block + at);
            channel->next = spare_channels;
            spare_channels = channel;
        }
    }
    spare_channels = channel->next;
    memset(channel, 0, sizeof *channel);
    for (int i = 0; i < PORTS; i++)
        channel->port[i].fd = -1;
    channel->id = id;
    channel->kind = kind;
    channel->out[0].last = channel->out[1].last = ~0ull;
    channel->out[0].ended = channel->out[1].ended = true;
    channel->next = table[id % BUCKETS];
    table[id % BUCKETS] = channel;
    *(kind == RELAYED ? &relayed : &commands) += 1;
    return channel;
}

static struct channel *find(u32 id)
{
    struct channel *channel = table[id % BUCKETS];
    while (channel && (channel->id != id || channel->dead))
        channel = channel->next;
    return channel;
}

static void each_channel(void (*act)(struct channel *))
{
    for (u32 i = 0; i < BUCKETS; i++)
        for (struct channel *channel = table[i]; channel; channel = channel->next)
            if (!channel->dead)
                act(channel);
}

/* --- descriptors --- */

static struct port *out_port(struct channel *channel, int which)
{
    return &channel->port[channel->kind == RELAYED ? STDIN : STDOUT + which];
}

static void hang_up(struct port *port)
{
    if (port->fd >= 0)
        SYS(close, port->fd); /* epoll forgets it, once a supervisor that was just forked has closed its copy */
    port->fd = -1;
    port->watched = 0;
}

static void watch_fd(struct channel *channel, int number, u32 wanted)
{
    struct port *port = &channel->port[number];
    if (port->fd < 0 || wanted == port->watched)
        return;
    struct epoll_event event = {.events = wanted, .data.u64 = (u64)(uintptr_t)channel | (u64)number};
    int how = !port->watched ? EPOLL_CTL_ADD : wanted ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    if (SYS(epoll_ctl, loop, how, port->fd, &event) >= 0)
        port->watched = wanted;
}

static bool has_room(const struct out *out)
{
    return !out->ended && out->got - out->acked < WINDOW;
}

/* Watch exactly what can go on: a full ring is not read, an empty one not written. A descriptor with nothing to
 * wait for is taken out, for epoll reports a hang-up of any other again and again. */
static void watch(struct channel *channel)
{
    u32 wanted[PORTS] = {0};
    if (channel->in.put < channel->in.got && !channel->in.closed)
        wanted[STDIN] |= EPOLLOUT;
    for (int i = 0; i < 2; i++)
        if (has_room(&channel->out[i]))
            wanted[out_port(channel, i) - channel->port] |= EPOLLIN;
    if (channel->kind == COMMAND)
        wanted[CONTROL] = EPOLLIN;
    if (channel->kind == LISTENER)
        wanted[STDIN] = accepting && !channel->hands ? EPOLLIN : 0;
    for (int i = 0; i < PORTS; i++)
        watch_fd(channel, i, wanted[i]);
}

/* --- what is to be said --- */

static void has_to_say(struct channel *channel)
{
    if (channel->later)
        return;
    channel->later = channel;
    *last_to_say = channel;
    last_to_say = &channel->later;
}

/* In a moment at the latest: of a short command the start, the ends of its streams and its own end are one write, for
 * which the host wakes once. */
static void has_to_say_soon(struct channel *channel)
{
    if (channel->kind != COMMAND || channel->phase >= EXITED)
        has_to_say(channel);
    else if (!quiet_until)
        quiet_until = now_ms() + MOMENT;
}

static void say_late(struct channel *channel)
{
    if (channel->kind == COMMAND)
        has_to_say(channel);
}

/* The queue ends in the channel that points to itself. */
static struct channel *next_to_say(void)
{
    struct channel *channel = first_to_say;
    if (!channel)
        return NULL;
    if (channel->later == channel) {
        first_to_say = NULL;
        last_to_say = &first_to_say;
    } else
        first_to_say = channel->later;
    channel->later = NULL;
    return channel;
}

/* Nothing of it is left but its place in the queue of those with something to say, where it is let go. */
static void drop(struct channel *channel)
{
    for (int i = 0; i < PORTS; i++)
        hang_up(&channel->port[i]); /* a supervisor whose control socket closes kills its tree and ends */
    give_ring(&channel->in.ring);
    give_ring(&channel->out[0].ring);
    give_ring(&channel->out[1].ring);
    channel->out[0].ended = channel->out[1].ended = true;
    channel->out[0].sent = channel->out[0].got + 1;
    channel->out[1].sent = channel->out[1].got + 1;
    if (channel->says_open) /* the host has not heard of it */
        channel->says_reset = false;
    channel->says_state = channel->says_open = channel->says_in = false;
    channel->dead = true;
    commands -= channel->kind != RELAYED;
    has_to_say(channel);
}

static void watch_listener(struct channel *channel)
{
    if (channel->kind == LISTENER)
        watch(channel);
}

static void let_go(struct channel *channel)
{
    struct channel **at = &table[channel->id % BUCKETS];
    while (*at != channel)
        at = &(*at)->next;
    *at = channel->next;
    relayed -= channel->kind == RELAYED; /* not before: while there is no link, none of these goes */
    channel->next = spare_channels;
    spare_channels = channel;
    if (!accepting) {
        accepting = true;
        each_channel(watch_listener);
    }
}

static void say(u8 type, u32 id, u8 stream, const void *payload, u32 length)
{
    struct frame frame = {.length = length, .type = type, .stream = stream, .id = id};
    memcpy(outgoing + outgoing_size, &frame, HEADER);
    if (length)
        memcpy(outgoing + outgoing_size + HEADER, payload, length);
    outgoing_size += HEADER + length;
}

static void say_hello(void)
{
    struct { u16 version, shield; u8 nonce[16]; } hello = {.version = VERSION};
    hello.shield = (u16)(shield.init | shield.signals << 1 | shield.calls << 2);
    memcpy(hello.nonce, nonce, sizeof nonce);
    say(HELLO, 0, 0, &hello, sizeof hello);
}

/* The next piece of a stream that the host has not seen. False when there is none. */
static bool say_stream(struct channel *channel, int which)
{
    struct out *out = &channel->out[which];
    if (out->sent > out->got || (out->sent == out->got && !out->ended))
        return false;
    if (out->sent == out->got) {
        say(END, channel->id, (u8)(STDOUT + which), &out->got, 8);
        out->sent++;
        return false;
    }
    u32 at = (u32)(out->sent % WINDOW), size = MAX_PAYLOAD - 8;
    if (size > out->got - out->sent)
        size = (u32)(out->got - out->sent);
    if (size > WINDOW - at)
        size = WINDOW - at;
    struct frame frame = {.length = 8 + size, .type = DATA, .stream = (u8)(STDOUT + which), .id = channel->id};
    memcpy(outgoing + outgoing_size, &frame, HEADER);
    memcpy(outgoing + outgoing_size + HEADER, &out->sent, 8);
    memcpy(outgoing + outgoing_size + HEADER + 8, out->ring + at, size);
    outgoing_size += HEADER + 8 + size;
    out->sent += size;
    return out->sent < out->got || out->ended;
}

/* Let the next bytes of the link carry a listener. Without a descriptor for that we accept for it ourselves. */
static u8 hand_over(struct channel *channel)
{
    if (!channel->hands || channel->phase != RUNNING)
        return 0;
    handing = (int)SYS(fcntl, channel->port[STDIN].fd, F_DUPFD_CLOEXEC, 3);
    channel->hands = handing >= 0;
    watch(channel);
    return channel->hands ? HANDED : 0;
}

/* One turn of a channel: all its small frames, and a piece of each stream. True when there is more. */
static bool say_turn(struct channel *channel)
{
    if (channel->says_open)
        say(OPEN, channel->id, 0, &channel->listener, 4);
    if (channel->says_state) {
        struct { u8 phase, marks; u16 stage; u32 pid; i32 status; u32 serial; } state = {
            channel->phase, channel->marks | hand_over(channel), channel->stage, channel->pid, channel->status,
            channel->serial};
        say(STATE, channel->id, 0, &state, sizeof state);
    }
    if (channel->says_reset)
        say(RESET, channel->id, 0, NULL, 0);
    else if (channel->says_in) {
        channel->in.told = channel->in.put + channel->in.closed;
        say(ACK, channel->id, STDIN, &channel->in.told, 8);
    }
    channel->says_open = channel->says_state = channel->says_reset = channel->says_in = false;
    if (!heard_ready || channel->kind == LISTENER)
        return false;
    bool more = say_stream(channel, 0);
    return (channel->kind == COMMAND && say_stream(channel, 1)) || more;
}

static void compose(void)
{
    enum { TURN = 256 + 2 * (HEADER + MAX_PAYLOAD) };
    while (outgoing_size + TURN <= OUTGOING && handing < 0) {
        struct channel *channel = next_to_say();
        if (!channel)
            break;
        if (say_turn(channel))
            has_to_say(channel);
        else if (channel->dead)
            let_go(channel);
    }
    if (says_ready && !first_to_say) {
        say(READY, 0, 0, NULL, 0);
        says_ready = false;
    }
    if (says_pong) {
        say(PONG, 0, 0, &pong, 8);
        says_pong = false;
    }
}

/* --- the link to the host --- */

static void know(struct channel *channel)
{
    channel->says_open = channel->kind == RELAYED;
    channel->says_state = !channel->says_open;
    if (channel->kind == COMMAND && channel->phase == UNBORN)
        channel->phase = RUNNING; /* the host has to know that we have it, before we know its pid */
    channel->says_reset = channel->in.broken;
    channel->says_in = channel->kind != LISTENER && !channel->in.broken;
    has_to_say(channel);
}

static void rewind_streams(struct channel *channel)
{
    for (int i = 0; i < 2; i++)
        channel->out[i].sent = channel->out[i].acked;
    has_to_say(channel);
}

static void watch_link(void)
{
    bool full = outgoing_sent < outgoing_size;
    struct epoll_event event = {.events = full ? EPOLLOUT : 0, .data.u64 = LINK_OUT};
    if (link_out == link) {
        event.events |= EPOLLIN;
        event.data.u64 = LINK;
    }
    if (full != link_full)
        SYS(epoll_ctl, loop, EPOLL_CTL_MOD, link_out, &event);
    link_full = full;
}

static void add_to_loop(int fd, u32 events, u64 what)
{
    struct epoll_event event = {.events = events, .data.u64 = what};
    SYS(fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK);
    SYS(epoll_ctl, loop, EPOLL_CTL_ADD, fd, &event);
}

static void greet(int in, int out)
{
    link = in;
    link_out = out;
    link_full = false;
    heard_hello = heard_ready = says_pong = false;
    received_size = outgoing_size = outgoing_sent = asked_size = 0;
    add_to_loop(in, EPOLLIN, LINK);
    if (out != in)
        add_to_loop(out, 0, LINK_OUT);
    say_hello();
    says_ready = true;
    for (struct channel *channel = first_to_say; channel; channel = channel->later == channel ? NULL : channel->later)
        channel->says_reset = false; /* what the host's list does not find here is over */
    each_channel(know);
}

static u32 strangers;

static void kill_stranger(u32 pid, void *context)
{
    (void)context;
    for (u32 i = 0; i < BUCKETS; i++)
        for (struct channel *channel = table[i]; channel; channel = channel->next)
            if (channel->kind == COMMAND && channel->supervisor == pid)
                return;
    strangers++;
    SYS(kill, pid, SIGKILL);
}

/* A supervisor that was killed leaves its tree to us: whoever is our child and no supervisor. */
static u32 kill_strangers(void)
{
    strangers = 0;
    each_child(kill_stranger);
    return strangers;
}

static bool reap_children(int options);

/* Ending takes a whole pid namespace along. Without one, each supervisor sees its control socket close and ends its
 * tree, and we end after them: what a supervisor that was killed leaves becomes ours. */
static void end_of_life(void)
{
    each_channel(drop);
    do
        kill_strangers();
    while (!shield.init && reap_children(0));
    quit(0);
}

static void hand_nothing(void)
{
    if (handing >= 0)
        SYS(close, handing);
    handing = -1;
}

static void hang_up_link(void)
{
    hand_nothing();
    if (!dialled)
        end_of_life();
    SYS(close, link);
    link = -1;
}

static void dial(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, dialled, length_of(dialled));
    int fd = (int)SYS(socket, AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    long error = fd < 0 ? fd : SYS(connect, fd, &address, sizeof address);
    if (error >= 0)
        greet(fd, fd);
    else if (fd >= 0)
        SYS(close, fd);
    if (error != -ENOENT)
        alone_since = 0;
    else if (!alone_since) /* nobody listens yet, or again: in a pod whose runner has died nobody ever will */
        alone_since = now_ms();
    else if (now_ms() - alone_since > (is_used ? LONELY : UNUSED)) /* unused: kept warm, and its run clones yet */
        end_of_life();
    if (error == -ECONNREFUSED) /* whoever listened there has ended: a host that is only busy lets us wait */
        end_of_life();
}

static long write_link(const u8 *bytes, size_t size)
{
    if (handing < 0)
        return SYS(write, link_out, bytes, size);
    struct { struct cmsghdr head; int fd; } control = {
        .head = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}, .fd = handing};
    struct iovec all = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    struct msghdr message = {
        .msg_iov = &all, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
    long n = SYS(sendmsg, link_out, &message, MSG_NOSIGNAL);
    if (n > 0)
        hand_nothing();
    return n;
}

static void flush(void)
{
    while (link >= 0) {
        if (outgoing_sent == outgoing_size) {
            outgoing_sent = outgoing_size = 0;
            compose();
            if (!outgoing_size)
                break;
        }
        long n = write_link(outgoing + outgoing_sent, outgoing_size - outgoing_sent);
        if (n == -EAGAIN || n == -EINTR)
            break;
        if (n < 0) {
            hang_up_link();
            return;
        }
        outgoing_sent += (size_t)n;
    }
    if (link >= 0)
        watch_link();
}

/* --- streams --- */

static void read_more(struct channel *channel, int which)
{
    struct out *out = &channel->out[which];
    struct port *port = out_port(channel, which);
    if (!has_room(out) || port->fd < 0)
        return;
    if (!out->ring && !(out->ring = take_ring()))
        return;
    u64 at = out->got % WINDOW, room = WINDOW - (out->got - out->acked);
    if (room > WINDOW - at)
        room = WINDOW - at;
    if (room > out->last)
        room = out->last;
    long n = room ? SYS(read, port->fd, out->ring + at, room) : 0;
    if (n == -EINTR || (n == -EAGAIN && out->last == ~0ull))
        return;
    if (n > 0) {
        out->got += (u64)n;
        if (out->last != ~0ull)
            out->last -= (u64)n;
    } else {
        out->ended = true;
        if (channel->kind == COMMAND)
            hang_up(port);
    }
    if (n < 0 && channel->kind == RELAYED) {
        channel->says_reset = true;
        drop(channel);
        return;
    }
    if (out->ended)
        has_to_say_soon(channel);
    else
        has_to_say(channel);
}

static void write_more(struct channel *channel)
{
    struct in *in = &channel->in;
    struct port *port = &channel->port[STDIN];
    while (in->put < in->got && !in->closed) {
        u64 at = in->put % WINDOW, size = in->got - in->put;
        if (size > WINDOW - at)
            size = WINDOW - at;
        long n = SYS(write, port->fd, in->ring + at, size);
        if (n == -EAGAIN || n == -EINTR)
            break;
        if (n < 0) {
            channel->says_reset = true;
            if (channel->kind == RELAYED) {
                drop(channel);
                return;
            }
            in->broken = in->closed = true;
            hang_up(port);
            give_ring(&in->ring);
            has_to_say(channel);
            return;
        }
        in->put += (u64)n;
    }
    if (in->ended && in->put == in->got && !in->closed) {
        in->closed = true;
        if (channel->kind == RELAYED)
            SYS(shutdown, port->fd, SHUT_WR);
        else
            hang_up(port);
        give_ring(&in->ring);
    }
    /* The end, an empty ring or a quarter of one: else each small write would be answered. */
    u64 passed_on = in->put + in->closed;
    if (passed_on > in->told && (in->closed || in->put == in->got || passed_on - in->told >= WINDOW / 4)) {
        channel->says_in = true;
        if (in->closed)
            has_to_say_soon(channel);
        else
            has_to_say(channel);
    }
}

/* --- commands --- */

static struct channel *fail(struct channel *channel, u8 stage, long error)
{
    channel->phase = FAILED;
    channel->stage = stage;
    channel->status = (i32)-error;
    channel->says_state = true;
    for (int i = 0; i < 2; i++)
        channel->out[i].ended = true;
    has_to_say(channel);
    return channel;
}

/* In the copy of us that becomes the supervisor: the command's descriptors to 0 to 2, control to 3, nothing else. */
static void settle_down(int ends[4])
{
    for (int i = 0; i < 4; i++) /* none of them is below 3, so none is overwritten before its turn */
        SYS(dup3, ends[i], i, i == 3 ? O_CLOEXEC : 0);
    close_from(4);
    memset(nonce, 0, sizeof nonce);
    memset(host_nonce, 0, sizeof host_nonce);
}

static void start(u32 id)
{
    struct channel *channel = take_channel(id, COMMAND);
    is_used = true;
    if (!channel)
        end_of_life(); /* not one page left: nothing here can go on */
    if (commands > MAX_COMMANDS) {
        fail(channel, REQUEST, -EAGAIN);
        return;
    }
    int pair[4][2];
    long error = 0, made = 0;
    while (made < 3 && error >= 0)
        if ((error = SYS(pipe2, pair[made], O_CLOEXEC)) >= 0)
            made++;
    if (error >= 0 && (error = SYS(socketpair, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair[3])) >= 0)
        made++;
    long pid = error < 0 ? error : SYS(clone, SIGCHLD);
    if (pid == 0) {
        int ends[4] = {pair[0][0], pair[1][1], pair[2][1], pair[3][1]};
        settle_down(ends);
        supervise((const struct request *)asked, asked_size, &shield, id);
    }
    for (int i = 0; i < made; i++) {
        int ours = pair[i][i == STDIN];
        SYS(close, pair[i][i != STDIN]);
        if (pid < 0) {
            SYS(close, ours);
            continue;
        }
        SYS(fcntl, ours, F_SETFL, O_RDWR | O_NONBLOCK);
        channel->port[i].fd = ours;
    }
    if (pid < 0) {
        fail(channel, FORK, pid);
        return;
    }
    channel->supervisor = (u32)pid;
    channel->out[0].ended = channel->out[1].ended = false;
    watch(channel);
}

/* Nothing of the tree lives: what is in the pipes by now is all that will count. */
static void gone(struct channel *channel)
{
    if (channel->phase != FAILED) {
        if (channel->phase != EXITED)
            channel->marks |= UNKNOWN;
        channel->phase = GONE;
        channel->says_state = true;
    }
    for (int i = 0; i < 2; i++) {
        int left = 0;
        struct port *port = out_port(channel, i);
        if (port->fd >= 0 && SYS(ioctl, port->fd, FIONREAD, &left) >= 0)
            channel->out[i].last = (u64)left;
        read_more(channel, i);
    }
    hang_up(&channel->port[CONTROL]);
    has_to_say(channel);
}

static void hear_supervisor(struct channel *channel)
{
    struct report report;
    while (channel->port[CONTROL].fd >= 0) {
        long n = SYS(recvfrom, channel->port[CONTROL].fd, &report, sizeof report, MSG_DONTWAIT);
        if (n == -ECONNRESET)
            continue; /* said once when it ended before it heard a signal of ours: its own words are still to come */
        if (n != sizeof report)
            break;
        if (report.what == 'P') {
            channel->says_state |= channel->phase == UNBORN;
            channel->phase = RUNNING;
            channel->pid = (u32)report.value;
        } else if (report.what == 'F') {
            fail(channel, report.stage, -report.value);
        } else if (report.what != 'G' && channel->phase < EXITED) {
            channel->phase = EXITED;
            channel->status = report.value;
            channel->says_state = true;
        }
        if (report.what == 'L' || report.what == 'G')
            gone(channel);
        has_to_say_soon(channel);
    }
}

static void end_tampered(struct channel *channel)
{
    if (channel->kind == COMMAND && channel->marks & TAMPERED && channel->phase < FAILED)
        gone(channel);
}

static void end_orphans(void)
{
    if (!kill_strangers()) {
        each_channel(end_tampered);
        tampered = 0;
    }
}

static void child_ended(u32 pid, int status)
{
    for (u32 i = 0; i < BUCKETS; i++)
        for (struct channel *channel = table[i]; channel; channel = channel->next) {
            if (channel->kind == COMMAND && channel->supervisor == pid) {
                hear_supervisor(channel); /* its last words come before its end */
                hang_up(&channel->port[CONTROL]);
                channel->supervisor = 0;
                if (channel->phase < FAILED && !channel->dead) {
                    channel->marks |= TAMPERED;
                    tampered++;
                }
                return;
            }
            if (channel->marks & TAMPERED && channel->pid == pid && channel->phase < EXITED) {
                channel->phase = EXITED;
                channel->status = status;
                channel->says_state = true;
                has_to_say(channel);
                return;
            }
        }
}

/* WNOHANG, or wait for one. False when there are none left. */
static bool reap_children(int options)
{
    u8 drained[1024];
    int status;
    long pid;
    SYS(read, children, drained, sizeof drained);
    for (; (pid = SYS(wait4, -1, &status, options | WUNTRACED, 0)) > 0; options = WNOHANG)
        if ((status & 0xff) == 0x7f)
            SYS(kill, pid, SIGCONT); /* nobody stops a supervisor */
        else
            child_ended((u32)pid, status);
    return pid == 0;
}

/* --- the relay --- */

static void listen_on(u32 id, u32 number, bool hands)
{
    struct channel *channel = take_channel(id, LISTENER);
    struct sockaddr_in address = {.sin_family = AF_INET};
    u32 size = sizeof address;
    int on = 1;
    if (!channel)
        end_of_life();
    if (commands > MAX_COMMANDS) {
        fail(channel, REQUEST, -EAGAIN);
        return;
    }
    address.sin_port = (u16)(number >> 8 | number << 8);
    address.sin_addr.s_addr = 0x0100007f;
    int fd = (int)SYS(socket, AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    long error = fd < 0 ? fd : SYS(setsockopt, fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (error >= 0)
        error = SYS(bind, fd, &address, sizeof address);
    if (error >= 0)
        error = SYS(listen, fd, 512);
    if (error >= 0)
        error = SYS(getsockname, fd, &address, &size);
    if (error < 0) {
        SYS(close, fd);
        fail(channel, LISTENING, error);
        return;
    }
    channel->port[STDIN].fd = fd;
    channel->hands = hands;
    channel->phase = RUNNING;
    channel->pid = (u16)(address.sin_port >> 8 | address.sin_port << 8);
    channel->says_state = true;
    has_to_say(channel);
    watch(channel);
}

static void accept_all(struct channel *listener)
{
    int on = 1;
    while ((accepting = relayed < MAX_RELAYED)) {
        int fd = (int)SYS(accept4, listener->port[STDIN].fd, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            accepting = fd != -EMFILE && fd != -ENFILE;
            break;
        }
        SYS(setsockopt, fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct channel *channel = take_channel(RELAY | ++last_relay, RELAYED);
        if (!channel)
            end_of_life();
        channel->listener = listener->id;
        channel->port[STDIN].fd = fd;
        channel->out[0].ended = false;
        channel->says_open = true;
        has_to_say(channel);
        watch(channel);
    }
    watch(listener);
}

/* --- what the host says; false breaks the connection --- */

static bool hear_hello(const u8 *payload)
{
    u16 version = (u16)(payload[0] | payload[1] << 8);
    if (heard_hello || version != VERSION || (host_known && !same(host_nonce, payload + 4, sizeof host_nonce)))
        return false;
    memcpy(host_nonce, payload + 4, sizeof host_nonce);
    return host_known = heard_hello = true;
}

static bool hear_request(const struct frame *frame, const u8 *payload)
{
    if ((asked_size && asked_id != frame->id) || frame->id & RELAY || asked_size + frame->length > MAX_REQUEST)
        return false;
    if (!asked && !(asked = map_pages(MAX_REQUEST)))
        end_of_life();
    memcpy(asked + asked_size, payload, frame->length);
    asked_size += frame->length;
    asked_id = frame->id;
    if (!frame->stream)
        return true;
    if (find(frame->id))
        return false;
    start(frame->id);
    if (asked_size > 1 << 16)
        SYS(madvise, asked, MAX_REQUEST, MADV_DONTNEED);
    asked_size = 0;
    return true;
}

static bool hear_data(struct channel *channel, const u8 *payload, u32 length)
{
    struct in *in = &channel->in;
    u64 offset, size = length - 8;
    memcpy(&offset, payload, 8);
    if (in->broken || channel->phase >= FAILED)
        return true;
    if (offset <= in->got && offset + size <= in->got)
        return true; /* twice, since it was received before the connection was lost */
    if (offset > in->got || offset + size - in->put > WINDOW || in->ended)
        return false;
    if (!in->ring && !(in->ring = take_ring()))
        return false;
    payload += 8 + (in->got - offset);
    for (size = offset + size - in->got; size;) {
        u64 at = in->got % WINDOW, part = size < WINDOW - at ? size : WINDOW - at;
        memcpy(in->ring + at, payload, part);
        payload += part;
        in->got += part;
        size -= part;
    }
    write_more(channel);
    return true;
}

static bool hear_end(struct channel *channel, u64 offset)
{
    if (channel->in.broken || channel->phase >= FAILED)
        return true;
    if (offset != channel->in.got)
        return false;
    channel->in.ended = true;
    write_more(channel);
    return true;
}

static bool hear_ack(struct channel *channel, u8 stream, u64 offset)
{
    if (stream == STDIN || (channel->kind == RELAYED && stream == STDERR))
        return false;
    struct out *out = &channel->out[stream - 1];
    if (offset > out->got + out->ended)
        return false;
    if (offset > out->acked)
        out->acked = offset;
    if (out->sent < out->acked)
        out->sent = out->acked;
    if (out->ended && out->acked >= out->got)
        give_ring(&out->ring);
    if (!heard_ready)
        return true;
    read_more(channel, stream - 1);
    return true;
}

static bool hear_signal(struct channel *channel, u32 serial, u32 number)
{
    if (channel->kind == RELAYED || number > 64)
        return false;
    if (serial <= channel->serial)
        return true;
    if (channel->kind == LISTENER && channel->phase == RUNNING && number == SIGKILL) {
        hang_up(&channel->port[STDIN]);
        channel->phase = GONE;
        channel->says_state = true;
    } else if (number == SIGKILL)
        SYS(shutdown, channel->port[CONTROL].fd, SHUT_WR);
    else if (SYS(sendto, channel->port[CONTROL].fd, &number, 4, MSG_NOSIGNAL | MSG_DONTWAIT) == -EAGAIN)
        return true; /* it is stopped, or busy with others: the host asks again, or kills */
    channel->serial = serial;
    channel->says_state |= channel->phase == RUNNING || channel->phase == EXITED; /* a final state is the last one */
    has_to_say(channel);
    return true;
}

static bool hear_channel(struct channel *channel, const struct frame *frame, const u8 *payload)
{
    u64 number = 0;
    if (frame->length >= 8)
        memcpy(&number, payload, 8);
    switch (frame->type) {
    case DATA:
        return frame->stream == STDIN && channel->kind != LISTENER && hear_data(channel, payload, frame->length);
    case END:
        return frame->stream == STDIN && channel->kind != LISTENER && hear_end(channel, number);
    case ACK:
        return channel->kind != LISTENER && hear_ack(channel, frame->stream, number);
    case SIGNAL:
        return hear_signal(channel, (u32)number, (u32)(number >> 32));
    default: /* FORGET, RESET */
        if (channel->kind != RELAYED && (frame->type == RESET || channel->phase < FAILED))
            return false;
        if (frame->type == RESET && !channel->in.closed) /* whoever reads there must not take it for the end */
            SYS(setsockopt, channel->port[STDIN].fd, SOL_SOCKET, SO_LINGER, &(struct linger){.l_onoff = 1}, 8);
        channel->says_reset = false;
        drop(channel);
        return true;
    }
}

static bool hear(const struct frame *frame, const u8 *payload)
{
    u32 number = 0;
    if (frame->length >= 4)
        memcpy(&number, payload, 4);
    if (!heard_hello)
        return frame->type == HELLO && hear_hello(payload);
    switch (frame->type) {
    case EXECUTE:
        return hear_request(frame, payload);
    case LISTEN:
        if (number > 65535 || frame->id & RELAY || find(frame->id))
            return false;
        listen_on(frame->id, number, frame->stream);
        return true;
    case PING:
        memcpy(&pong, payload, 8);
        return says_pong = true;
    case READY:
        if (heard_ready)
            return false;
        heard_ready = true;
        each_channel(rewind_streams);
        return true;
    case DATA: case END: case ACK: case SIGNAL: case FORGET: case RESET: {
        struct channel *channel = find(frame->id);
        if (!channel) /* let go meanwhile: only of relayed connections may the host not know that */
            return frame->id & RELAY;
        bool fine = hear_channel(channel, frame, payload);
        if (!channel->dead)
            watch(channel);
        return fine;
    }
    default:
        return false;
    }
}

static bool well_formed(const struct frame *frame)
{
    static const u32 sizes[TYPES] = {[HELLO] = 20, [END] = 8, [ACK] = 8, [SIGNAL] = 8, [LISTEN] = 4, [PING] = 8};
    if (frame->zero || frame->stream > STDERR || !frame->type || frame->type >= TYPES)
        return false;
    if (frame->type == DATA)
        return frame->length > 8 && frame->length <= MAX_PAYLOAD;
    if (frame->type == EXECUTE)
        return frame->length && frame->length <= MAX_PAYLOAD;
    return frame->length == sizes[frame->type];
}

static void hear_link(void)
{
    long n = SYS(read, link, received + received_size, RECEIVED - received_size);
    if (n == -EAGAIN || n == -EINTR)
        return;
    if (n <= 0) {
        hang_up_link();
        return;
    }
    received_size += (size_t)n;
    size_t at = 0;
    while (received_size - at >= HEADER) {
        struct frame frame;
        memcpy(&frame, received + at, HEADER);
        if (!well_formed(&frame)) {
            hang_up_link();
            return;
        }
        if (received_size - at < HEADER + frame.length)
            break;
        if (!hear(&frame, received + at + HEADER)) {
            hang_up_link();
            return;
        }
        at += HEADER + frame.length;
    }
    received_size -= at;
    for (size_t i = 0; i < received_size && at; i++)
        received[i] = received[at + i];
}

/* --- the loop --- */

static void happened(struct channel *channel, int number)
{
    if (channel->dead || channel->port[number].fd < 0)
        return; /* ended by what came before it in this batch */
    if (number == CONTROL)
        hear_supervisor(channel);
    else if (channel->kind == LISTENER)
        accept_all(channel);
    else {
        if (number == STDIN && channel->in.put < channel->in.got)
            write_more(channel);
        for (int i = 0; i < 2 && !channel->dead; i++)
            if (out_port(channel, i) == &channel->port[number])
                read_more(channel, i);
    }
    if (!channel->dead)
        watch(channel);
}

/* False when commands cannot be kept from what they can be kept from here. */
static bool prepare(void)
{
    struct rlimit raised;
    int is_subreaper = 0;
    u64 child_signal = 1ull << (SIGCHLD - 1);
    struct { long handler, flags, restorer; u64 mask; } default_action = {0};
    for (int signal = 1; signal <= 64; signal++)
        SYS(rt_sigaction, signal, &default_action, 0, 8);
    SYS(rt_sigprocmask, SIG_BLOCK, &every_signal, 0, 8);
    SYS(prctl, PR_SET_DUMPABLE, 0);
    SYS(prctl, PR_SET_CHILD_SUBREAPER, 1); /* whatever this answers: not everywhere does it do anything */
    shield.marks = SYS(prctl, PR_GET_CHILD_SUBREAPER, &is_subreaper) < 0 || !is_subreaper;
    SYS(getrandom, nonce, sizeof nonce, 0);
    SYS(prlimit64, 0, RLIMIT_NOFILE, 0, &shield.files);
    raised = (struct rlimit){shield.files.rlim_max, shield.files.rlim_max};
    SYS(prlimit64, 0, RLIMIT_NOFILE, &raised, 0);
    shield.init = SYS(getpid, 0) == 1;
    shield.signals = SYS(landlock_create_ruleset, 0, 0, 1 /* version */) >= 6;
    SYS(prctl, PR_SET_NO_NEW_PRIVS, 1);
    if (!keep_calls() && SYS(seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &(u32){SECCOMP_RET_ERRNO}) >= 0)
        return false;
    shield.calls = are_calls_closed();
    loop = (int)SYS(epoll_create1, EPOLL_CLOEXEC);
    children = (int)SYS(signalfd4, -1, &child_signal, 8, O_CLOEXEC | O_NONBLOCK);
    add_to_loop(children, EPOLLIN, CHILDREN);
    return true;
}

/* The channel is descriptor 0, or 0 and `out` where that is another; with a path there is none yet. */
static int run(const char *path, int out)
{
    int channel = path ? -1 : (int)SYS(fcntl, 0, F_DUPFD_CLOEXEC, 3);
    int answers = out ? (int)SYS(fcntl, out, F_DUPFD_CLOEXEC, 3) : channel;
    if (path ? length_of(path) >= sizeof ((struct sockaddr_un *)0)->sun_path : channel < 0 || answers < 0)
        return 2;
    received = map_own_pages(RECEIVED);
    outgoing = map_own_pages(OUTGOING);
    if (!received || !outgoing || !prepare())
        return 2;
    int nothing = (int)SYS(openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3; fd++) /* whoever started us reads the end of them, not our silence */
        SYS(dup3, nothing, fd, 0);
    dialled = path;
    if (!path)
        greet(channel, answers);
    for (long next_dial = 0, wait = 10;;) {
        if (link < 0 && now_ms() >= next_dial) {
            dial();
            wait = link >= 0 ? 10 : wait < 80 ? wait * 2 : wait;
            next_dial = now_ms() + wait;
        }
        if (tampered)
            end_orphans();
        if (quiet_until && now_ms() >= quiet_until) {
            quiet_until = 0;
            each_channel(say_late);
        }
        flush();
        struct epoll_event events[BATCH];
        long patience = quiet_until ? MOMENT : tampered ? 5 : link < 0 ? wait : -1;
        long count = SYS(epoll_pwait, loop, events, BATCH, patience, 0, 8);
        for (long i = 0; i < count; i++)
            if (events[i].data.u64 >= CHANNELS)
                happened((struct channel *)(uintptr_t)(events[i].data.u64 & ~7ull), (int)(events[i].data.u64 & 7));
            else if (events[i].data.u64 == CHILDREN)
                reap_children(WNOHANG);
            else if (events[i].data.u64 == LINK_OUT && events[i].events & EPOLLERR)
                hang_up_link(); /* nobody reads what we say: as good as the end of what we hear */
            else if (link >= 0)
                hear_link();
    }
}

/* Into the control groups of version 1 whose lists of tasks are open. Who moves himself has nobody to wait for; for who
 * moves another, the kernel first waits until nobody forks. */
static bool move_into(char **lists)
{
    for (; *lists; lists++) {
        long list = (long)number_of(*lists);
        if (SYS(write, list, "0", 1) != 1)
            return false;
        SYS(close, list);
    }
    return true;
}

/* Give up the real-time priority of whoever started us: a limited group does not take a process that has one, and
 * commands with one would not heed the limit. */
static void be_ordinary(void)
{
    long policy = SYS(sched_getscheduler, 0) & 0xff;
    int priority = 0;
    if (policy == 1 /* FIFO */ || policy == 2 /* RR */ || policy == 6 /* DEADLINE */)
        SYS(sched_setscheduler, 0, 0, &priority);
}

/* `guest`, `guest -`, `guest PATH`, `guest + DESCRIPTOR...`, as a command `guest list`, `guest pack`, `guest remove`
 * and `guest show`, in a pod the words of pod.h, or outside of a workspace `guest - DESCRIPTOR USER PROGRAM WORDS...`,
 * with `-` for our own user. */
static int start_up(int argc, char **argv, char **env)
{
    char way = argc > 1 ? argv[1][0] : 0;
    be_ordinary();
    int ended = argc > 1 && way != '-' && way != '+' && way != '/' ? serve_pod(argc, argv, env) : -1;
    if (ended >= 0)
        return ended;
    if (way == 'l')
        return list_trees(argc - 2, argv + 2);
    if ((way == 'p' || way == 'r') && argc == 3)
        return each_file(argv[2], way == 'p' ? pack : remove_one);
    if (way == 's' && argc == 4)
        return show(argv[2], number_of(argv[3]));
    if (way == '+')
        return move_into(argv + 2) ? run(NULL, 0) : 3;
    if (way == '-' && argc > 4)
        guard((int)number_of(argv[2]), argv[3], argv + 4, env);
    return run(way == '-' ? NULL : argv[1], way == '-');
}

#ifdef HOSTED
int main(int argc, char **argv, char **env)
{
    return start_up(argc, argv, env);
}
#else
__attribute__((used)) void begin(long *stack)
{
    char **argv = (char **)(stack + 1);
    quit(start_up((int)stack[0], argv, argv + stack[0] + 1));
}
__asm__(".globl _start\n_start:\n" ENTRY);
#endif
