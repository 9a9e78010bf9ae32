/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Both ends of the bench of gateways: engines that answer at once, and a load that counts what comes back. In C, because
 * on the one core that both share they must cost less than what is measured.
 *
 *   traffic engines FIRST_PORT COUNT [INTERVAL]
 *   traffic load PORT PATH KEY CONNECTIONS SECONDS TOKENS RATE [PROMPT]
 *
 * TOKENS 0 asks for one JSON answer, else for a stream of so many events. With RATE 0 each connection asks again as soon
 * as it has its answer, which fills whatever is measured; else all together ask RATE times a second. PROMPT is text that
 * stands in JSON as it is.
 *
 * An engine writes each event of a stream by itself, one in INTERVAL milliseconds, or as fast as it can, when it gives every
 * other stream its turn before the next one. The load
 * prints one line of JSON: answered and failed requests, events, seconds, and the time from a request's last byte to the
 * answer's first one in microseconds. What began before the first tenth of the time was over is not counted.
 */
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
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 65536, EVENTS = 512, LONGEST_US = 2000000, PROMPT = 400, LONGEST_REQUEST = 16384 };

struct connection {
	int fd;
	int listening;
	size_t filled;
	char buffer[BUFFER];
	/* engine */
	long left;	/* events that the stream still has */
	double due;	/* when it may have the next one */
	int queued;	/* is in the list of streams */
	struct connection *next;
	/* load */
	struct connection *paces;	/* a timer: the connection that asks when it fires */
	int idle;
	double sent_at;
	int in_head, status, chunked, counted;
	long length;	/* bytes of the body, or of the chunk, that are still to come; -1: the size line comes next */
	int last_chunk, matched;
};

static int poller;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double now(void)
{
	struct timespec moment;
	clock_gettime(CLOCK_MONOTONIC, &moment);
	return moment.tv_sec + moment.tv_nsec / 1e9;
}

static struct sockaddr_in loopback(int port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return address;
}

static struct connection *watch(int fd, int listening)
{
	struct connection *made = calloc(1, sizeof *made);
	struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = made};
	int on = 1;
	if (!made)
		die("calloc");
	made->fd = fd;
	made->listening = listening;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &wanted))
		die("epoll_ctl");
	return made;
}

/* Value of a header in a head that ends with an empty line, or NULL. */
static const char *header(const char *head, const char *name)
{
	size_t length = strlen(name);
	for (const char *line = strstr(head, "\r\n"); line && line[2] != '\r'; line = strstr(line + 2, "\r\n"))
		if (!strncasecmp(line + 2, name, length))
			return line + 2 + length;
	return NULL;
}

/* Engines ----------------------------------------------------------------------------------------------------------- */

static struct connection *streams;
static double interval;

static const char EVENT[] =
	"data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"bench\",\"choices\":"
	"[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
static const char ANSWER[] =
	"{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"bench\",\"choices\":[{\"index\":0,"
	"\"message\":{\"role\":\"assistant\",\"content\":\"word\"},\"finish_reason\":\"stop\"}],"
	"\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":1,\"total_tokens\":101}}";
static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"owned_by\":\"vllm\"}]}";
static const char METRICS[] =
	"vllm:num_requests_running{engine=\"0\",model_name=\"bench\"} 1.0\n"
	"vllm:num_requests_waiting{engine=\"0\",model_name=\"bench\"} 0.0\n"
	"vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"bench\"} 0.01\n"
	"vllm:num_preemptions_total{engine=\"0\",model_name=\"bench\"} 0.0\n"
	"vllm:generation_tokens_total{engine=\"0\",model_name=\"bench\"} 0.0\n"
	"vllm:prompt_tokens_total{engine=\"0\",model_name=\"bench\"} 0.0\n"
	"vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"65536\"} 1.0\n";

static int give(struct connection *client, const char *data, size_t length)
{
	/* What fits in no socket buffer is waited for: nothing here is longer than the least of them. */
	while (length) {
		ssize_t written = send(client->fd, data, length, MSG_NOSIGNAL);
		if (written < 0 && errno == EAGAIN)
			continue;
		if (written < 0)
			return -1;
		data += written;
		length -= written;
	}
	return 0;
}

static void reply(struct connection *client, const char *type, const char *body)
{
	char message[4096];
	int length = snprintf(message, sizeof message,
			      "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n%s", type, strlen(body), body);
	give(client, message, length);
}

static void leave(struct connection *client)
{
	close(client->fd);
	client->fd = -1;
	if (!client->queued)
		free(client);
}

/* Answers the request at the start of the buffer. Returns how long it is, 0 if it is not whole. */
static size_t answer(struct connection *client)
{
	char *end = strstr(client->buffer, "\r\n\r\n");
	const char *length, *tokens;
	size_t whole;
	if (!end)
		return 0;
	length = header(client->buffer, "content-length:");
	whole = end + 4 - client->buffer + (length ? strtoul(length, NULL, 10) : 0);
	if (client->filled < whole)
		return 0;
	if (!strncmp(client->buffer, "POST", 4)) {
		if (memmem(end, whole - (end - client->buffer), "\"stream\":true", 13)) {
			static const char HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
						   "Transfer-Encoding: chunked\r\n\r\n";
			tokens = memmem(end, whole - (end - client->buffer), "\"max_tokens\":", 13);
			client->left = tokens ? strtol(tokens + 13, NULL, 10) : 1;
			client->due = interval ? now() + interval : 0;
			give(client, HEAD, sizeof HEAD - 1);
			if (!client->queued) {
				client->queued = 1;
				client->next = streams;
				streams = client;
			}
		} else {
			reply(client, "application/json", ANSWER);
		}
	} else if (!strncmp(client->buffer, "GET /metrics", 12)) {
		reply(client, "text/plain", METRICS);
	} else if (!strncmp(client->buffer, "GET /v1/models", 14)) {
		reply(client, "application/json", MODELS);
	} else {
		reply(client, "application/json", "{\"status\":\"ok\",\"model_path\":\"bench\",\"is_generation\":true}");
	}
	return whole;
}

static void serve(struct connection *client)
{
	ssize_t got = recv(client->fd, client->buffer + client->filled, BUFFER - 1 - client->filled, 0);
	size_t used;
	if (got < 0 && errno == EAGAIN)
		return;
	if (got <= 0) {
		leave(client);
		return;
	}
	client->filled += got;
	client->buffer[client->filled] = 0;
	while (client->filled && (used = answer(client))) {
		memmove(client->buffer, client->buffer + used, client->filled - used + 1);
		client->filled -= used;
	}
}

/* One event to each stream whose socket takes it. */
static void stream(void)
{
	static char chunk[sizeof EVENT + 16];
	static int length;
	struct connection **place = &streams, *client;
	double moment = interval ? now() : 0;
	if (!length)
		length = sprintf(chunk, "%zx\r\n%s\r\n", sizeof EVENT - 1, EVENT);
	while ((client = *place)) {
		if (client->fd >= 0 && client->due > moment) {
			place = &client->next;
			continue;
		}
		client->due += interval;
		ssize_t written = client->fd < 0 ? -1 : send(client->fd, chunk, length, MSG_NOSIGNAL);
		int ended = client->fd < 0;
		if (written > 0) {
			if (written < length)
				give(client, chunk + written, length - written);
			if (!--client->left) {
				static const char END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
				give(client, END, sizeof END - 1);
				ended = 1;
			}
		} else if (client->fd >= 0 && errno != EAGAIN) {
			ended = 1;
		}
		if (ended) {
			*place = client->next;
			client->queued = 0;
			if (client->fd < 0)
				free(client);
		} else {
			place = &client->next;
		}
	}
}

static void engines(int first, int count)
{
	struct epoll_event ready[EVENTS];
	for (int port = first; port < first + count; port++) {
		struct sockaddr_in address = loopback(port);
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
		if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 1024))
			die("engine");
		watch(fd, 1);
	}
	for (;;) {
		int count = epoll_wait(poller, ready, EVENTS, !streams ? -1 : interval ? 1 : 0);
		for (int index = 0; index < count; index++) {
			struct connection *one = ready[index].data.ptr;
			if (one->listening) {
				int fd = accept4(one->fd, NULL, NULL, SOCK_NONBLOCK);
				if (fd >= 0)
					watch(fd, 0);
			} else {
				serve(one);
			}
		}
		stream();
	}
}

/* Load -------------------------------------------------------------------------------------------------------------- */

static char request[LONGEST_REQUEST];
static size_t request_length;
static double counts_from, ends_at;
static long answered, failed, events;
static uint32_t first_byte_us[LONGEST_US + 1];
static long measured, rate;

static void ask(struct connection *server)
{
	server->idle = 0;
	server->in_head = 1;
	server->filled = 0;
	server->status = 0;
	server->matched = 0;
	server->sent_at = now();
	server->counted = server->sent_at >= counts_from;
	if (send(server->fd, request, request_length, MSG_NOSIGNAL) != (ssize_t)request_length)
		die("send");
}

static struct connection *connect_to(struct connection *server, int port)
{
	struct sockaddr_in address = loopback(port);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(fd, (struct sockaddr *)&address, sizeof address))
		die("connect");
	fcntl(fd, F_SETFL, O_NONBLOCK);
	if (server) {
		struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = server};
		int on = 1;
		close(server->fd);
		server->fd = fd;
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
		if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &wanted))
			die("epoll_ctl");
	} else {
		server = watch(fd, 0);
	}
	if (rate)
		server->idle = 1;
	else
		ask(server);
	return server;
}

static void pace(struct connection *server, int number, int connections)
{
	long interval = 1000000000L * connections / rate, first = interval * (number + 1) / connections;
	struct itimerspec times = {.it_interval = {interval / 1000000000, interval % 1000000000},
				   .it_value = {first / 1000000000, first % 1000000000}};
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	if (fd < 0 || timerfd_settime(fd, 0, &times, NULL))
		die("timerfd");
	watch(fd, 0)->paces = server;
}

static void tick(struct connection *timer)
{
	uint64_t fired;
	if (read(timer->fd, &fired, sizeof fired) > 0 && timer->paces->idle)
		ask(timer->paces);
}

static void count_events(struct connection *server, const char *data, size_t length)
{
	static const char SIGN[] = "data: {";
	for (size_t index = 0; index < length; index++) {
		server->matched = data[index] == SIGN[server->matched] ? server->matched + 1 : data[index] == SIGN[0];
		if (server->matched == sizeof SIGN - 1) {
			server->matched = 0;
			events += now() < ends_at ? server->counted : 0;
		}
	}
}

/* Takes what has come of a body. Returns 1 when it is whole. */
static int take(struct connection *server)
{
	size_t offset = 0;
	int whole = 0;
	while (offset < server->filled && !whole) {
		char *data = server->buffer + offset;
		size_t here = server->filled - offset;
		if (server->chunked && server->length < 0) {
			char *line = memmem(data, here, "\r\n", 2);
			if (!line)
				break;
			offset += line + 2 - data;
			if (server->last_chunk) {
				whole = line == data;
				continue;
			}
			if (line == data)
				continue; /* the end of the chunk before */
			server->length = strtol(data, NULL, 16);
			if (!server->length) {
				server->last_chunk = 1;
				server->length = -1;
			}
			continue;
		}
		if (here > (size_t)server->length)
			here = server->length;
		count_events(server, data, here);
		offset += here;
		server->length -= here;
		if (!server->length) {
			whole = !server->chunked;
			server->length = -1;
		}
	}
	memmove(server->buffer, server->buffer + offset, server->filled - offset);
	server->filled -= offset;
	return whole;
}

static void hear(struct connection *server, int port)
{
	ssize_t got = recv(server->fd, server->buffer + server->filled, BUFFER - 1 - server->filled, 0);
	int whole = 0;
	if (got < 0 && errno == EAGAIN)
		return;
	if (got <= 0) {
		failed++;
		connect_to(server, port);
		return;
	}
	if (server->in_head && !server->filled && server->counted) {
		double late = (now() - server->sent_at) * 1e6;
		first_byte_us[late < LONGEST_US ? (int)late : LONGEST_US]++;
		measured++;
	}
	server->filled += got;
	if (server->in_head) {
		const char *length, *coding;
		char *end;
		server->buffer[server->filled] = 0;
		end = strstr(server->buffer, "\r\n\r\n");
		if (!end)
			return;
		server->status = atoi(server->buffer + 9);
		length = header(server->buffer, "content-length:");
		coding = header(server->buffer, "transfer-encoding:");
		server->chunked = coding != NULL;
		server->last_chunk = 0;
		server->length = coding ? -1 : length ? strtol(length, NULL, 10) : 0;
		server->in_head = 0;
		server->filled -= end + 4 - server->buffer;
		memmove(server->buffer, end + 4, server->filled);
		whole = !coding && !server->length;
	}
	if (!whole)
		whole = take(server);
	if (whole) {
		if (server->status != 200)
			failed++;
		else if (server->counted && now() < ends_at)
			answered++;
		if (rate)
			server->idle = 1;
		else
			ask(server);
	}
}

static long share(double part)
{
	long seen = 0;
	for (int late = 0; late <= LONGEST_US; late++)
		if ((seen += first_byte_us[late]) >= part * measured)
			return late;
	return -1;
}

static void load(int port, const char *path, const char *key, int connections, double seconds, long tokens, const char *prompt)
{
	struct epoll_event ready[EVENTS];
	char body[LONGEST_REQUEST - 1024], made[PROMPT + 1], wanted[64] = "";
	double begun_at = now();
	for (int index = 0; index < PROMPT; index++)
		made[index] = index % 6 ? 'a' + index % 26 : ' ';
	made[PROMPT] = 0;
	prompt = prompt ? prompt : made;
	if (strlen(prompt) > sizeof body - 256) {
		fprintf(stderr, "the prompt is too long\n");
		exit(2);
	}
	if (tokens)
		snprintf(wanted, sizeof wanted, ",\"stream\":true,\"max_tokens\":%ld", tokens);
	snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"model\":\"bench\"%s}", prompt, wanted);
	request_length = snprintf(request, sizeof request,
				  "POST %s HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer %s\r\n"
				  "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
				  path, key, strlen(body), body);
	counts_from = begun_at + seconds / 10;
	ends_at = begun_at + seconds;
	for (int index = 0; index < connections; index++) {
		struct connection *server = connect_to(NULL, port);
		if (rate)
			pace(server, index, connections);
	}
	while (now() < ends_at) {
		int count = epoll_wait(poller, ready, EVENTS, 100);
		for (int index = 0; index < count; index++) {
			struct connection *one = ready[index].data.ptr;
			if (one->paces)
				tick(one);
			else
				hear(one, port);
		}
	}
	printf("{\"answered\": %ld, \"failed\": %ld, \"events\": %ld, \"seconds\": %.3f, \"p50_us\": %ld, \"p99_us\": %ld}\n",
	       answered, failed, events, ends_at - counts_from, share(0.5), share(0.99));
}

int main(int count, char **arguments)
{
	signal(SIGPIPE, SIG_IGN);
	poller = epoll_create1(0);
	if ((count == 4 || count == 5) && !strcmp(arguments[1], "engines")) {
		interval = count == 5 ? atof(arguments[4]) / 1000 : 0;
		engines(atoi(arguments[2]), atoi(arguments[3]));
	} else if ((count == 9 || count == 10) && !strcmp(arguments[1], "load")) {
		rate = atol(arguments[8]);
		load(atoi(arguments[2]), arguments[3], arguments[4], atoi(arguments[5]), atof(arguments[6]), atol(arguments[7]),
		     count == 10 ? arguments[9] : NULL);
	} else
		fprintf(stderr, "usage: traffic engines FIRST_PORT COUNT [INTERVAL] | "
				"load PORT PATH KEY CONNECTIONS SECONDS TOKENS RATE [PROMPT]\n");
	return 2 * (count < 2);
}
