// A server that streams like SGLang's chat route and knows the truth: when each request arrived and each chunk was written.
//
// One thread, epoll, busy waiting, so that its own timing is exact. Usage:
//     stub_server TOKENS_PER_CHUNK FIRST_US GAP_US BURST TRUTH_FILE
// prints its port; on SIGTERM writes what it did to TRUTH_FILE and ends. BURST 1 sends the chunks of all streams
// together, every GAP_US, as a decode step does; BURST 0 gives each stream its own times.
//
// TRUTH_FILE: int64 records. One per request: -1, note, arrived_ns (by the kernel's stamp, since a burst keeps this server
// from reading for milliseconds, which no client can know); one per chunk: note, sent_ns, tokens so far. The note is
// the number that leads each prompt ("Note 123."), which is how the client's requests are recognised.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STREAMS = 8192, REQUEST_BYTES = 1 << 17 };

struct stream {
    int fd, active;
    int64_t note, due_ns;
    int asked, sent, chunks;
    size_t have;  // bytes of the request
    char *request;
    size_t heap_place;
};

struct record {
    int64_t a, b, c;
};

static struct stream streams[MAX_STREAMS];
static struct stream *heap[MAX_STREAMS];
static size_t heap_size;
static struct record *truth;
static size_t truth_size, truth_space;
static volatile sig_atomic_t stopping;
static int tokens_per_chunk, burst;
static int64_t first_ns, gap_ns, next_burst_ns;

static void stop(int signal) {
    (void)signal;
    stopping = 1;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Waiting without taking the execution units from the client, whose core may be the other thread of ours.
static void relax(void) {
#if defined(__x86_64__)
    for (int i = 0; i < 8; i++) __builtin_ia32_pause();
#elif defined(__aarch64__)
    for (int i = 0; i < 8; i++) __asm__ volatile("isb");
#endif
}

static void note(int64_t a, int64_t b, int64_t c) {
    if (truth_size == truth_space) {
        truth_space = truth_space ? 2 * truth_space : 1 << 22;
        truth = realloc(truth, truth_space * sizeof *truth);
        if (!truth) abort();
    }
    truth[truth_size++] = (struct record){a, b, c};
}

static void heap_put(size_t place, struct stream *stream) {
    heap[place] = stream;
    stream->heap_place = place;
}

static void heap_up(size_t place) {
    struct stream *stream = heap[place];
    while (place && heap[(place - 1) / 2]->due_ns > stream->due_ns) {
        heap_put(place, heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    heap_put(place, stream);
}

static void heap_down(size_t place) {
    struct stream *stream = heap[place];
    for (;;) {
        size_t child = 2 * place + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
        if (heap[child]->due_ns >= stream->due_ns) break;
        heap_put(place, heap[child]);
        place = child;
    }
    heap_put(place, stream);
}

static void heap_add(struct stream *stream) {
    heap[heap_size] = stream;
    heap_up(heap_size++);
}

static void heap_remove(struct stream *stream) {
    size_t place = stream->heap_place;
    struct stream *last = heap[--heap_size];
    if (last == stream) return;
    heap_put(place, last);
    heap_down(place);
    heap_up(last->heap_place);
}

static void drop(struct stream *stream, int from_heap) {
    if (stream->active && from_heap) heap_remove(stream);
    stream->active = 0;
    stream->have = 0;
    close(stream->fd);
}

// Writes all of it; a client that does not read for long enough to fill its buffers is given up.
static int write_all(struct stream *stream, const char *data, int length) {
    while (length > 0) {
        ssize_t count = write(stream->fd, data, length);
        if (count < 0 && errno != EAGAIN) return -1;
        if (count > 0) data += count, length -= count;
    }
    return 0;
}

static int add_event(char *to, const char *data, int length) {
    return sprintf(to, "%x\r\n%.*s\r\n", length, length, data);
}

// Sends the next chunk; whether the stream goes on.
static int send_chunk(struct stream *stream) {
    char event[512], bytes[2048];
    int count = stream->asked - stream->sent < tokens_per_chunk ? stream->asked - stream->sent : tokens_per_chunk;
    stream->sent += count;
    stream->chunks++;
    int last = stream->sent == stream->asked;
    int length = sprintf(event,
                         "data: {\"id\":\"%016llx\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                         "\"model\":\"stub\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word%d\"},"
                         "\"finish_reason\":%s}],\"usage\":{\"prompt_tokens\":64,\"total_tokens\":%d,"
                         "\"completion_tokens\":%d}}\n\n",
                         (unsigned long long)stream->note, stream->sent, last ? "\"length\"" : "null",
                         64 + stream->sent, stream->sent);
    length = add_event(bytes, event, length);
    note(stream->note, now_ns(), stream->sent);
    if (write_all(stream, bytes, length)) return -1;
    if (!last) return 1;
    length = sprintf(event,
                     "data: {\"id\":\"%016llx\",\"choices\":[],\"usage\":{\"prompt_tokens\":64,\"total_tokens\":%d,"
                     "\"completion_tokens\":%d},\"sglext\":{\"spec_tokens_details\":{\"spec_verify_ct\":%d}}}\n\n"
                     "data: [DONE]\n\n",
                     (unsigned long long)stream->note, 64 + stream->sent, stream->sent, stream->chunks - 1);
    length = add_event(bytes, event, length);
    length += sprintf(bytes + length, "0\r\n\r\n");
    return write_all(stream, bytes, length) ? -1 : 0;
}

static void begin(struct stream *stream, int64_t arrived_ns) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    int64_t now = now_ns();
    const char *found = strstr(stream->request, "Note ");
    const char *asked = strstr(stream->request, "\"max_tokens\":");
    stream->note = found ? atoll(found + 5) : 0;
    stream->asked = asked ? atoi(asked + 13) : 1;
    stream->sent = stream->chunks = 0;
    stream->have = 0;
    note(-1, stream->note, arrived_ns);
    stream->active = 1;
    stream->due_ns = now + first_ns;
    if (burst) stream->due_ns = next_burst_ns + (stream->due_ns - next_burst_ns + gap_ns - 1) / gap_ns * gap_ns;
    heap_add(stream);
    if (write_all(stream, head, sizeof head - 1)) drop(stream, 1);
}

static void take(struct stream *stream) {
    struct iovec part = {stream->request + stream->have, REQUEST_BYTES - 1 - stream->have};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(struct timespec))];
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t count = recvmsg(stream->fd, &message, 0);
    if (count <= 0) {
        if (count == 0 || errno != EAGAIN) drop(stream, 1);
        return;
    }
    stream->have += count;
    stream->request[stream->have] = 0;
    char *body = strstr(stream->request, "\r\n\r\n");
    char *length = strcasestr(stream->request, "\r\ncontent-length:");
    if (!body) return;
    size_t wanted = body + 4 - stream->request + (length && length < body ? atoi(length + 17) : 0);
    if (stream->have < wanted) return;
    int64_t arrived_ns = now_ns();
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header) {
        struct timespec *stamp = (struct timespec *)CMSG_DATA(header);
        arrived_ns = stamp->tv_sec * 1000000000LL + stamp->tv_nsec;
    }
    begin(stream, arrived_ns);
}

int main(int count, char **arguments) {
    if (count != 6) {
        fprintf(stderr, "usage: stub_server TOKENS_PER_CHUNK FIRST_US GAP_US BURST TRUTH_FILE\n");
        return 2;
    }
    tokens_per_chunk = atoi(arguments[1]);
    first_ns = atoll(arguments[2]) * 1000;
    gap_ns = atoll(arguments[3]) * 1000;
    burst = atoi(arguments[4]);
    signal(SIGTERM, stop);
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) return 1;
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL}, events[256];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    next_burst_ns = now_ns();
    int polls = 0;
    while (!stopping) {
        int64_t now = now_ns();
        while (heap_size && heap[0]->due_ns <= now) {
            struct stream *stream = heap[0];
            int more = send_chunk(stream);
            if (more > 0) {
                stream->due_ns += gap_ns;
                heap_down(0);
            } else {
                heap_remove(stream);
                stream->active = 0;
                if (more < 0) drop(stream, 0);
            }
        }
        if (heap_size && ++polls % 8) {  // new requests can wait for some microseconds, chunks cannot
            relax();
            continue;
        }
        int ready = epoll_wait(epoll, events, 256, heap_size ? 0 : 10);
        for (int i = 0; i < ready; i++) {
            struct stream *stream = events[i].data.ptr;
            if (stream) {
                take(stream);
                continue;
            }
            int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
            if (fd < 0 || fd >= MAX_STREAMS) continue;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
            stream = &streams[fd];
            if (!stream->request) stream->request = malloc(REQUEST_BYTES);
            stream->fd = fd;
            stream->active = 0;
            stream->have = 0;
            struct epoll_event watch = {.events = EPOLLIN, .data.ptr = stream};
            epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &watch);
        }
    }
    FILE *file = fopen(arguments[5], "wb");
    if (!file) return 1;
    fwrite(truth, sizeof *truth, truth_size, file);
    return fclose(file) ? 1 : 0;
}
