// The same measurement with as little as it takes: what a load generator costs is compared with this one.
//
// Keeps STREAMS requests in flight at 127.0.0.1:PORT for SECONDS. One read per readable socket, with the kernel's stamp
// and the time of handling; the token count of each chunk; a row per chunk (request, arrival, lag, tokens, gap).
// Usage: c_client PORT STREAMS TOKENS SECONDS
// Prints: chunks, tokens and processor microseconds in the last SECONDS - 2, and seconds of it.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STREAMS = 8192, WARM_UP_S = 2 };

struct stream {
    int fd, tokens, number;
    int64_t last_ns;
};

struct row {
    int64_t request, arrival_ns, lag_ns, tokens, gap_ns;
};

static struct stream streams[MAX_STREAMS];
static int next_number;

static int64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void ask(struct stream *stream, int tokens) {
    char body[512], request[1024];
    stream->number = next_number++;
    stream->tokens = 0;
    stream->last_ns = 0;
    int length = sprintf(body,
                         "{\"model\":\"stub\",\"max_tokens\":%d,\"stream\":true,"
                         "\"messages\":[{\"role\":\"user\",\"content\":\"Note %d.\"}]}",
                         tokens, 100000000 + stream->number);
    length = sprintf(request,
                     "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                     "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                     length, body);
    if (write(stream->fd, request, length) != length) abort();
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    int port = atoi(arguments[1]), wanted = atoi(arguments[2]), tokens = atoi(arguments[3]), on = 1;
    double seconds = atof(arguments[4]);
    int epoll = epoll_create1(0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < wanted; i++) {
        int fd = streams[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof address)) return 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &streams[i]};
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
    }
    // As in the load generator, the first requests are of all lengths, so that they do not end together.
    for (int i = 0; i < wanted; i++) ask(&streams[i], 1 + (int)((i + 0.5) * tokens / wanted));
    size_t space = 1 << 23, stored = 0;
    struct row *rows = malloc(space * sizeof *rows);
    int64_t begin = clock_ns(CLOCK_MONOTONIC), measured = 0, processor = 0, chunks = 0, all_tokens = 0;
    static char buffer[65536];
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(struct timespec))];
    struct epoll_event events[512];
    for (;;) {
        int64_t now = clock_ns(CLOCK_MONOTONIC);
        if (!measured && now - begin > WARM_UP_S * 1000000000LL) {
            measured = now;
            processor = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
            chunks = all_tokens = 0;
        }
        if (now - begin > seconds * 1e9) break;
        int ready = epoll_wait(epoll, events, 512, 100);
        for (int i = 0; i < ready; i++) {
            struct stream *stream = events[i].data.ptr;
            struct iovec part = {buffer, sizeof buffer - 1};
            struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                                     .msg_controllen = sizeof control};
            ssize_t length = recvmsg(stream->fd, &message, 0);
            if (length <= 0) return 1;
            buffer[length] = 0;
            int64_t handled_ns = clock_ns(CLOCK_REALTIME), arrival_ns = handled_ns;
            struct cmsghdr *header = CMSG_FIRSTHDR(&message);
            if (header) {
                struct timespec *stamp = (struct timespec *)CMSG_DATA(header);
                arrival_ns = stamp->tv_sec * 1000000000LL + stamp->tv_nsec;
            }
            const char *place = buffer;
            while ((place = strstr(place, "\"completion_tokens\":"))) {
                int seen = atoi(place += 20);
                if (seen > stream->tokens) {
                    rows[stored++ % space] = (struct row){stream->number, arrival_ns, handled_ns - arrival_ns,
                                                          seen - stream->tokens, arrival_ns - stream->last_ns};
                    chunks++;
                    all_tokens += seen - stream->tokens;
                    stream->tokens = seen;
                    stream->last_ns = arrival_ns;
                }
            }
            if (length >= 7 && !memcmp(buffer + length - 7, "\r\n0\r\n\r\n", 7)) ask(stream, tokens);
        }
    }
    int64_t end = clock_ns(CLOCK_MONOTONIC);
    printf("%lld %lld %.1f %.6f\n", (long long)chunks, (long long)all_tokens,
           (clock_ns(CLOCK_PROCESS_CPUTIME_ID) - processor) / 1e3, (end - measured) / 1e9);
    return 0;
}
