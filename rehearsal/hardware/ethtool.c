/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * What the kernel answers a program that asks a network interface's driver for its counters (SIOCETHTOOL), for the
 * simulated ports. Named in /etc/ld.so.preload, it takes the place of the C library's ioctl() in every program of the
 * host, and hands on to the kernel all that is not about such a port. Formats are those of <linux/ethtool.h>.
 *
 * host/ethtool_counters lists the counters, a line each: NAME, or a name with "{}" where each priority goes ("prio3"), with
 * a "!" before it if the counter is there only while flow control is on for the priority. ports/N/ethtool/NAME has the
 * count; without the file it is 0.
 *
 * Like nvml.c it is built on one machine and runs on others with an older C library.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define STATE_VARIABLE "RINGMASTER_REHEARSAL_HARDWARE"
#define STATE_FOLDER "/var/lib/ringmaster-rehearsal/hardware"

enum { SIOCETHTOOL = 0x8946, GET_STRINGS = 0x1b, GET_STATISTICS = 0x1d, GET_STRING_SET_INFO = 0x37 };
enum { STATISTICS = 1 /* ETH_SS_STATS */, NAME_LENGTH = 32 /* ETH_GSTRING_LEN */, INTERFACE_LENGTH = 16 };
enum { MOST_PORTS = 32, PRIORITIES = 8, LARGEST_PATH = 512, LARGEST_LIST = 16384 };

typedef unsigned long long u64;

struct request {
    char interface[INTERFACE_LENGTH];
    void *data;
};

struct set_info {
    unsigned command, reserved;
    u64 mask;
    unsigned lengths[1];
};

struct strings {
    unsigned command, set, count;
    char names[];
};

struct statistics {
    unsigned command, count;
    u64 values[];
};

/* Reads a file of the state; gives its length without white space at its end, -1 if there is none. */
static long read_state(const char *path, char *text, size_t size)
{
    char full[2 * LARGEST_PATH];
    const char *named = getenv(STATE_VARIABLE);
    snprintf(full, sizeof full, "%s/%s", named && *named ? named : STATE_FOLDER, path);
    int file = open(full, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return -1;
    ssize_t length = read(file, text, size - 1);
    close(file);
    if (length < 0)
        length = 0;
    while (length > 0 && strchr(" \t\r\n", text[length - 1]))
        length--;
    text[length] = '\0';
    return length;
}

/* The number of the port with this interface, -1 if none has it. */
static int port_of(const char *interface)
{
    char path[LARGEST_PATH], netdev[NAME_LENGTH];
    for (int port = 0; port < MOST_PORTS; port++) {
        snprintf(path, sizeof path, "ports/%d/netdev", port);
        if (read_state(path, netdev, sizeof netdev) < 0)
            return -1;
        if (strncmp(netdev, interface, INTERFACE_LENGTH) == 0)
            return port;
    }
    return -1;
}

static u64 count_of(int port, const char *name)
{
    char path[LARGEST_PATH], text[NAME_LENGTH];
    u64 number = 0;
    snprintf(path, sizeof path, "ports/%d/ethtool/%s", port, name);
    if (read_state(path, text, sizeof text) > 0)
        for (const char *digit = text; *digit >= '0' && *digit <= '9'; digit++)
            number = number * 10 + (u64)(*digit - '0');
    return number;
}

/* Calls `take` with each counter of a port in the driver's order; gives how many there are. */
static unsigned each_counter(int port, void (*take)(int port, unsigned position, const char *name, void *to), void *to)
{
    char list[LARGEST_LIST], path[LARGEST_PATH], flags[64] = "";
    unsigned count = 0;
    if (read_state("host/ethtool_counters", list, sizeof list) < 0)
        return 0;
    snprintf(path, sizeof path, "ports/%d/pfc", port);
    read_state(path, flags, sizeof flags);
    for (int priority = -1; priority < PRIORITIES; priority++)
        for (const char *line = list; *line;) {
            const char *end = strchr(line, '\n');
            size_t length = end ? (size_t)(end - line) : strlen(line);
            char name[NAME_LENGTH] = "", pattern[NAME_LENGTH] = "";
            snprintf(pattern, sizeof pattern, "%.*s", (int)length, line);
            line += length + (end != NULL);
            /* Flags of the priorities are "0,0,0,1,0,0,0,0". */
            int on = priority >= 0 && strlen(flags) > 2 * (size_t)priority && flags[2 * priority] == '1';
            char *start = pattern + (*pattern == '!'), *place = strstr(start, "{}");
            if ((place != NULL) != (priority >= 0) || (*pattern == '!' && !on))
                continue;
            if (place)
                snprintf(name, sizeof name, "%.*sprio%d%s", (int)(place - start), start, priority, place + 2);
            else
                snprintf(name, sizeof name, "%s", start);
            if (take)
                take(port, count, name, to);
            count++;
        }
    return count;
}

static void put_name(int port, unsigned position, const char *name, void *to)
{
    (void)port;
    char *place = (char *)to + (size_t)position * NAME_LENGTH;
    memset(place, 0, NAME_LENGTH);
    memcpy(place, name, strlen(name));
}

static void put_count(int port, unsigned position, const char *name, void *to)
{
    ((u64 *)to)[position] = count_of(port, name);
}

static void put_zero(int port, unsigned position, const char *name, void *to)
{
    (void)port, (void)name;
    ((u64 *)to)[position] = 0;
}

/* 1 if the request is answered here. */
static int answer(int port, void *data)
{
    char folder[2 * LARGEST_PATH];
    struct set_info *info = data;
    struct strings *strings = data;
    struct statistics *statistics = data;
    const char *named = getenv(STATE_VARIABLE);
    switch (info->command) {
    case GET_STRING_SET_INFO:
        if (info->mask != 1ULL << STATISTICS)
            return 0;
        info->lengths[0] = each_counter(port, NULL, NULL);
        return 1;
    case GET_STRINGS:
        if (strings->set != STATISTICS)
            return 0;
        strings->count = each_counter(port, put_name, strings->names);
        return 1;
    case GET_STATISTICS:
        /* Where nothing was ever counted, there is no file to look for. */
        snprintf(folder, sizeof folder, "%s/ports/%d/ethtool", named && *named ? named : STATE_FOLDER, port);
        statistics->count = each_counter(port, access(folder, F_OK) == 0 ? put_count : put_zero, statistics->values);
        return 1;
    default:
        return 0;
    }
}

EXPORTED int ioctl(int descriptor, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (request == SIOCETHTOOL && argument) {
        const struct request *asked = argument;
        int before = errno, port = asked->data ? port_of(asked->interface) : -1;
        int answered = port >= 0 && answer(port, asked->data);
        errno = before;
        if (answered)
            return 0;
    }
    return (int)syscall(SYS_ioctl, descriptor, request, argument);
}
