/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * A stand-in for NVIDIA's management library (libnvidia-ml.so.1). It answers from a folder of one-value files, which may
 * change while a process holds the library: gpus/0/uuid, gpus/0/ecc_pending, gpus/0/nvlinks/3/state and so on. A missing
 * file means that the card has no such thing, and the answer is NVML_ERROR_NOT_SUPPORTED.
 *
 * Names, arguments, structures and codes are those of NVML's interface as NVIDIA documents it and as nvidia-ml-py calls it.
 * What is not here is not exported, so that a caller is told "function not found" as by an older driver.
 *
 * Files that change how a call behaves:
 *   gpus/N/lost               1: the card has fallen off its bus
 *   gpus/N/hang               1: calls on the card block until the file says 0
 *   gpus/N/busy_milliseconds  calls on the card take that long
 *   errors/FUNCTION           a code that the function answers instead of its own
 *
 * It is built on one machine and runs on others with an older C library: only functions that every glibc since 2.17 has
 * under the same symbol version are used. strtol and stat are not among them.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define STATE_VARIABLE "RINGMASTER_REHEARSAL_HARDWARE"
#define STATE_FOLDER "/var/lib/ringmaster-rehearsal/hardware"

enum code {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

enum { LARGEST_PATH = 512, LARGEST_VALUE = 256, MOST_GPUS = 32, MOST_LINKS = 36, MIB_SHIFT = 20 };

typedef unsigned long long u64;

/* A handle points to one of these; its place in `devices` is the card's index in NVML. */
struct device {
    int folder; /* number of the folder below gpus/: a card that is absent leaves a gap there, none in NVML */
    int file;   /* its /dev/nvidiaN, which NVML keeps open as long as it is in use; -1 where there is none */
    unsigned links; /* of NVLink; their number is fixed */
};

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device;
    unsigned device_id, subsystem_id;
    char bus_id[32];
};

struct memory {
    u64 total, free, used;
};

struct memory_v2 {
    unsigned version;
    u64 total, reserved, free, used;
};

struct process_v1 {
    unsigned pid;
    u64 used_memory;
};

struct process_v2 {
    unsigned pid;
    u64 used_memory;
    unsigned gpu_instance, compute_instance;
};

struct utilization {
    unsigned gpu, memory;
};

struct histogram {
    unsigned max, high, partial, low, none;
};

struct temperature_v1 {
    unsigned version, sensor;
    int temperature;
};

struct field_value {
    unsigned field, scope;
    long long timestamp, latency_microseconds;
    unsigned type, code;
    union {
        double real;
        unsigned number;
        u64 large;
    } value;
};

static char root[LARGEST_PATH];
static struct device devices[MOST_GPUS];
static unsigned device_count;
static int initialized;

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* Reads a value without the white space at its end. Gives 0 if there is no such file. */
static int read_text(const char *path, char *text, size_t size)
{
    char full[2 * LARGEST_PATH];
    snprintf(full, sizeof full, "%s/%s", root, path);
    int file = open(full, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t length = read(file, text, size - 1);
    close(file);
    if (length < 0)
        length = 0;
    while (length > 0 && strchr(" \t\r\n", text[length - 1]))
        length--;
    text[length] = '\0';
    return 1;
}

static int parse(const char *text, unsigned base, u64 *number)
{
    u64 sum = 0;
    if (base == 16 && text[0] == '0' && (text[1] | 32) == 'x')
        text += 2;
    if (!*text)
        return 0;
    for (; *text; text++) {
        unsigned digit = *text >= '0' && *text <= '9' ? (unsigned)(*text - '0') : (unsigned)((*text | 32) - 'a' + 10);
        if (digit >= base)
            return 0;
        sum = sum * base + digit;
    }
    *number = sum;
    return 1;
}

/* Reads a decimal number: SUCCESS, NOT_SUPPORTED without the file, UNKNOWN for anything that is no number. */
static enum code read_number(const char *path, u64 *number)
{
    char text[LARGEST_VALUE];
    if (!read_text(path, text, sizeof text))
        return NOT_SUPPORTED;
    return parse(text, 10, number) ? SUCCESS : UNKNOWN;
}

static u64 number_or(const char *path, u64 otherwise)
{
    u64 number;
    return read_number(path, &number) == SUCCESS ? number : otherwise;
}

static enum code write_number(const char *path, u64 number)
{
    char full[2 * LARGEST_PATH], fresh[2 * LARGEST_PATH + 8], text[32];
    snprintf(full, sizeof full, "%s/%s", root, path);
    snprintf(fresh, sizeof fresh, "%s.%d", full, (int)getpid());
    int length = snprintf(text, sizeof text, "%llu\n", number);
    int file = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0)
        return UNKNOWN;
    int whole = write(file, text, (size_t)length) == length;
    close(file);
    return whole && rename(fresh, full) == 0 ? SUCCESS : UNKNOWN;
}

/* The path of a value of a card, in one of a few buffers in turn: two may be in use at once. */
static const char *of(const struct device *device, const char *name)
{
    static __thread char paths[4][LARGEST_PATH];
    static __thread unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, LARGEST_PATH, "gpus/%d/%s", device->folder, name);
    return path;
}

static const char *of_link(const struct device *device, unsigned link, const char *name)
{
    char below[LARGEST_VALUE];
    snprintf(below, sizeof below, "nvlinks/%u/%s", link, name);
    return of(device, below);
}

static unsigned count_links(const struct device *device)
{
    unsigned count = 0;
    u64 state;
    while (count < MOST_LINKS && read_number(of_link(device, count, "state"), &state) == SUCCESS)
        count++;
    return count;
}

/* ---- entering a call --------------------------------------------------------------------------------------------- */

static enum code injected(const char *function)
{
    char path[LARGEST_PATH];
    snprintf(path, sizeof path, "errors/%s", function);
    return (enum code)number_or(path, SUCCESS);
}

static enum code enter(const char *function)
{
    return initialized ? injected(function) : UNINITIALIZED;
}

/* Every call on a card starts here: the card may be lost, hung or slow. */
static enum code enter_device(const struct device *device, const char *function)
{
    if (!initialized)
        return UNINITIALIZED;
    if (device < devices || device >= devices + device_count)
        return INVALID_ARGUMENT;
    while (number_or(of(device, "hang"), 0))
        usleep(50000);
    u64 busy = number_or(of(device, "busy_milliseconds"), 0);
    if (busy)
        usleep((useconds_t)(1000 * busy));
    if (number_or(of(device, "lost"), 0))
        return GPU_IS_LOST;
    return injected(function);
}

#define ENTER(device)                                             \
    do {                                                          \
        enum code entered_ = enter_device((device), __func__);    \
        if (entered_ != SUCCESS)                                  \
            return entered_;                                      \
    } while (0)

#define REQUIRE(condition, otherwise) \
    do {                              \
        if (!(condition))             \
            return (otherwise);       \
    } while (0)

static enum code give_number(const struct device *device, const char *name, unsigned *value)
{
    u64 number;
    REQUIRE(value, INVALID_ARGUMENT);
    enum code code = read_number(of(device, name), &number);
    if (code == SUCCESS)
        *value = (unsigned)number;
    return code;
}

static enum code give_path_text(const char *path, char *text, unsigned size)
{
    char found[LARGEST_VALUE];
    REQUIRE(text, INVALID_ARGUMENT);
    if (!read_text(path, found, sizeof found))
        return NOT_SUPPORTED;
    REQUIRE(strlen(found) < size, INSUFFICIENT_SIZE);
    strcpy(text, found);
    return SUCCESS;
}

/* Most calls give one number, or one text, of one card. */
#define GIVES_NUMBER(function, name)                                        \
    EXPORTED enum code function(const struct device *device, unsigned *value) \
    {                                                                       \
        ENTER(device);                                                      \
        return give_number(device, name, value);                            \
    }

#define GIVES_CONSTANT(function, constant)                                  \
    EXPORTED enum code function(const struct device *device, unsigned *value) \
    {                                                                       \
        ENTER(device);                                                      \
        REQUIRE(value, INVALID_ARGUMENT);                                   \
        *value = (constant);                                                \
        return SUCCESS;                                                     \
    }

#define GIVES_TEXT(function, name)                                                       \
    EXPORTED enum code function(const struct device *device, char *text, unsigned size)  \
    {                                                                                    \
        ENTER(device);                                                                   \
        return give_path_text(of(device, name), text, size);                             \
    }

/* ---- library and system ------------------------------------------------------------------------------------------ */

EXPORTED enum code nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    const char *named = getenv(STATE_VARIABLE);
    if (!initialized) {
        snprintf(root, sizeof root, "%s", named && *named ? named : STATE_FOLDER);
        if (!number_or("driver/loaded", 0))
            return DRIVER_NOT_LOADED;
        enum code code = injected("nvmlInit_v2");
        if (code != SUCCESS)
            return code;
        /* Cards are counted once, as the driver does when it is opened. */
        device_count = 0;
        for (int folder = 0; folder < MOST_GPUS; folder++) {
            struct device candidate = {folder, -1, 0};
            if (!number_or(of(&candidate, "present"), 0))
                continue;
            char node[32];
            snprintf(node, sizeof node, "/dev/nvidia%u", (unsigned)number_or(of(&candidate, "minor_number"), 0));
            candidate.file = open(node, O_RDWR | O_CLOEXEC);
            candidate.links = count_links(&candidate);
            devices[device_count++] = candidate;
        }
    }
    initialized++;
    return SUCCESS;
}

EXPORTED enum code nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

EXPORTED enum code nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

EXPORTED enum code nvmlShutdown(void)
{
    REQUIRE(initialized, UNINITIALIZED);
    if (--initialized == 0)
        for (unsigned index = 0; index < device_count; index++)
            if (devices[index].file >= 0)
                close(devices[index].file);
    return SUCCESS;
}

EXPORTED const char *nvmlErrorString(enum code code)
{
    static const struct {
        int code;
        const char *text;
    } texts[] = {
        {SUCCESS, "The operation was successful"},
        {UNINITIALIZED, "Uninitialized"},
        {INVALID_ARGUMENT, "Invalid Argument"},
        {NOT_SUPPORTED, "Not Supported"},
        {NO_PERMISSION, "Insufficient Permissions"},
        {5, "Already Initialized"},
        {NOT_FOUND, "Not Found"},
        {INSUFFICIENT_SIZE, "Insufficient Size"},
        {8, "Insufficient External Power"},
        {DRIVER_NOT_LOADED, "Driver Not Loaded"},
        {10, "Timeout"},
        {11, "Interrupt Request Issue"},
        {12, "NVML Shared Library Not Found"},
        {13, "Function Not Found"},
        {14, "Corrupted infoROM"},
        {GPU_IS_LOST, "GPU is lost"},
        {16, "GPU requires reset"},
        {17, "GPU access blocked by the operating system"},
        {18, "Driver/library version mismatch"},
        {19, "In use by another client"},
        {20, "Insufficient Memory"},
        {21, "No data"},
        {ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"},
    };
    for (size_t index = 0; index < sizeof texts / sizeof *texts; index++)
        if (texts[index].code == (int)code)
            return texts[index].text;
    return "Unknown Error";
}

static enum code give_system_text(const char *function, const char *path, char *text, unsigned size)
{
    enum code code = enter(function);
    return code == SUCCESS ? give_path_text(path, text, size) : code;
}

EXPORTED enum code nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    return give_system_text(__func__, "driver/version", text, size);
}

EXPORTED enum code nvmlSystemGetNVMLVersion(char *text, unsigned size)
{
    return give_system_text(__func__, "driver/nvml_version", text, size);
}

EXPORTED enum code nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    enum code code = enter(__func__);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(version, INVALID_ARGUMENT);
    *version = (int)number_or("driver/cuda_version", 0);
    return SUCCESS;
}

EXPORTED enum code nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* ---- finding a card ---------------------------------------------------------------------------------------------- */

EXPORTED enum code nvmlDeviceGetCount_v2(unsigned *count)
{
    enum code code = enter(__func__);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = device_count;
    return SUCCESS;
}

EXPORTED enum code nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

EXPORTED enum code nvmlDeviceGetHandleByIndex_v2(unsigned index, const struct device **device)
{
    enum code code = enter(__func__);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(device && index < device_count, INVALID_ARGUMENT);
    code = enter_device(&devices[index], __func__);
    if (code == SUCCESS)
        *device = &devices[index];
    return code;
}

EXPORTED enum code nvmlDeviceGetHandleByIndex(unsigned index, const struct device **device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static enum code find(const char *function, const char *name, const char *wanted, const struct device **device)
{
    enum code code = enter(function);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(wanted && device, INVALID_ARGUMENT);
    for (unsigned index = 0; index < device_count; index++) {
        char text[LARGEST_VALUE];
        if (read_text(of(&devices[index], name), text, sizeof text) && strcmp(text, wanted) == 0) {
            code = enter_device(&devices[index], function);
            if (code == SUCCESS)
                *device = &devices[index];
            return code;
        }
    }
    return NOT_FOUND;
}

EXPORTED enum code nvmlDeviceGetHandleByUUID(const char *uuid, const struct device **device)
{
    return find(__func__, "uuid", uuid, device);
}

EXPORTED enum code nvmlDeviceGetHandleBySerial(const char *serial, const struct device **device)
{
    return find(__func__, "serial", serial, device);
}

/* Splits DOMAIN:BUS:DEVICE.FUNCTION; the domain may have four or eight digits or be left out. */
static int split_address(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
    char copy[32], *parts[3], *part = copy;
    int count = 0;
    if (strlen(text) >= sizeof copy)
        return 0;
    strcpy(copy, text);
    char *dot = strchr(copy, '.');
    if (dot && (dot[1] < '0' || dot[1] > '7' || dot[2]))
        return 0;
    if (dot)
        *dot = '\0';
    while (count < 3) {
        parts[count++] = part;
        part = strchr(part, ':');
        if (!part)
            break;
        *part++ = '\0';
    }
    u64 numbers[3] = {0, 0, 0};
    if (count < 2 || part)
        return 0;
    for (int index = 0; index < count; index++)
        if (!parse(parts[index], 16, &numbers[3 - count + index]))
            return 0;
    *domain = (unsigned)numbers[0];
    *bus = (unsigned)numbers[1];
    *device = (unsigned)numbers[2];
    return 1;
}

EXPORTED enum code nvmlDeviceGetHandleByPciBusId_v2(const char *address, const struct device **device)
{
    unsigned domain, bus, slot;
    char plain[32];
    REQUIRE(address && split_address(address, &domain, &bus, &slot), INVALID_ARGUMENT);
    snprintf(plain, sizeof plain, "%04x:%02x:%02x.0", domain, bus, slot);
    return find(__func__, "pci_address", plain, device);
}

EXPORTED enum code nvmlDeviceGetHandleByPciBusId(const char *address, const struct device **device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(address, device);
}

EXPORTED enum code nvmlDeviceGetIndex(const struct device *device, unsigned *index)
{
    ENTER(device);
    REQUIRE(index, INVALID_ARGUMENT);
    *index = (unsigned)(device - devices);
    return SUCCESS;
}

/* ---- what a card is ---------------------------------------------------------------------------------------------- */

GIVES_TEXT(nvmlDeviceGetName, "name")
GIVES_TEXT(nvmlDeviceGetUUID, "uuid")
GIVES_TEXT(nvmlDeviceGetSerial, "serial")
GIVES_TEXT(nvmlDeviceGetBoardPartNumber, "board_part_number")
GIVES_TEXT(nvmlDeviceGetVbiosVersion, "vbios_version")
GIVES_TEXT(nvmlDeviceGetInforomImageVersion, "inforom_image_version")
GIVES_NUMBER(nvmlDeviceGetMinorNumber, "minor_number")
GIVES_NUMBER(nvmlDeviceGetModuleId, "module_id")
GIVES_NUMBER(nvmlDeviceGetBrand, "brand")
GIVES_NUMBER(nvmlDeviceGetArchitecture, "architecture")
GIVES_NUMBER(nvmlDeviceGetNumGpuCores, "cores")
GIVES_NUMBER(nvmlDeviceGetMemoryBusWidth, "memory_bus_bits")
GIVES_NUMBER(nvmlDeviceGetNumFans, "fans")
GIVES_CONSTANT(nvmlDeviceGetBusType, 2)       /* PCI Express */
GIVES_CONSTANT(nvmlDeviceGetDisplayMode, 0)   /* no monitor is connected */
GIVES_CONSTANT(nvmlDeviceGetDisplayActive, 0) /* none is set up */
GIVES_CONSTANT(nvmlDeviceIsMigDeviceHandle, 0)

EXPORTED enum code nvmlDeviceGetGspFirmwareVersion(const struct device *device, char *text)
{
    ENTER(device);
    return give_path_text("driver/version", text, 64);
}

EXPORTED enum code nvmlDeviceGetCudaComputeCapability(const struct device *device, int *major, int *minor)
{
    char text[LARGEST_VALUE];
    u64 first, second;
    ENTER(device);
    REQUIRE(major && minor, INVALID_ARGUMENT);
    REQUIRE(read_text(of(device, "compute_capability"), text, sizeof text), NOT_SUPPORTED);
    char *dot = strchr(text, '.');
    REQUIRE(dot, UNKNOWN);
    *dot = '\0';
    REQUIRE(parse(text, 10, &first) && parse(dot + 1, 10, &second), UNKNOWN);
    *major = (int)first;
    *minor = (int)second;
    return SUCCESS;
}

/* The ids of PCI have the vendor in their low half, NVIDIA's is 0x10de. */
static enum code give_pci(const char *address, const char *device_id, const char *subsystem, struct pci_info *info)
{
    u64 number;
    REQUIRE(info, INVALID_ARGUMENT);
    memset(info, 0, sizeof *info);
    REQUIRE(split_address(address, &info->domain, &info->bus, &info->device), UNKNOWN);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", info->domain & 0xffff, info->bus & 0xff,
             info->device & 0xff);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", info->domain, info->bus, info->device);
    if (parse(device_id, 16, &number))
        info->device_id = (unsigned)number << 16 | 0x10de;
    if (parse(subsystem, 16, &number))
        info->subsystem_id = (unsigned)number << 16 | 0x10de;
    return SUCCESS;
}

EXPORTED enum code nvmlDeviceGetPciInfo_v3(const struct device *device, struct pci_info *info)
{
    char address[LARGEST_VALUE], device_id[LARGEST_VALUE] = "", subsystem[LARGEST_VALUE] = "";
    ENTER(device);
    REQUIRE(read_text(of(device, "pci_address"), address, sizeof address), UNKNOWN);
    read_text(of(device, "pci_device"), device_id, sizeof device_id);
    read_text(of(device, "pci_subsystem"), subsystem, sizeof subsystem);
    return give_pci(address, device_id, subsystem, info);
}

/* ---- memory and processes ---------------------------------------------------------------------------------------- */

struct process {
    unsigned pid;
    u64 mib;
};

/* The processes of a kind ("compute" or "graphics") that still live; gives their number. */
static unsigned processes(const struct device *device, const char *kind, struct process *found, unsigned most)
{
    char path[2 * LARGEST_PATH];
    unsigned count = 0;
    snprintf(path, sizeof path, "%s/%s", root, of(device, "processes"));
    DIR *folder = opendir(path);
    if (!folder)
        return 0;
    for (struct dirent *entry; count < most && (entry = readdir(folder));) {
        char value[LARGEST_VALUE], below[LARGEST_VALUE];
        u64 pid;
        if (!parse(entry->d_name, 10, &pid))
            continue;
        snprintf(path, sizeof path, "/proc/%llu", pid);
        snprintf(below, sizeof below, "processes/%llu/kind", pid);
        if (access(path, F_OK) != 0 || !read_text(of(device, below), value, sizeof value))
            continue;
        if (kind && strcmp(value, kind) != 0)
            continue;
        snprintf(below, sizeof below, "processes/%llu/memory_mib", pid);
        found[count++] = (struct process){(unsigned)pid, number_or(of(device, below), 0)};
    }
    closedir(folder);
    return count;
}

enum { MOST_PROCESSES = 256 };

static enum code give_processes(const struct device *device, const char *kind, unsigned *count, void *to, size_t size)
{
    struct process found[MOST_PROCESSES];
    REQUIRE(count, INVALID_ARGUMENT);
    unsigned number = processes(device, kind, found, MOST_PROCESSES);
    if (*count < number || (number && !to)) {
        *count = number;
        return INSUFFICIENT_SIZE;
    }
    for (unsigned index = 0; index < number; index++) {
        struct process_v2 one = {found[index].pid, found[index].mib << MIB_SHIFT, ~0u, ~0u};
        /* The first version is the second one's beginning. */
        memcpy((char *)to + index * size, &one, size);
    }
    *count = number;
    return SUCCESS;
}

#define GIVES_PROCESSES(function, kind, structure)                                              \
    EXPORTED enum code function(const struct device *device, unsigned *count, structure *to)    \
    {                                                                                           \
        ENTER(device);                                                                          \
        return give_processes(device, kind, count, to, sizeof *to);                             \
    }

GIVES_PROCESSES(nvmlDeviceGetComputeRunningProcesses, "compute", struct process_v1)
GIVES_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute", struct process_v2)
GIVES_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute", struct process_v2)
GIVES_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, "graphics", struct process_v1)
GIVES_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", struct process_v2)
GIVES_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", struct process_v2)
GIVES_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, "mps", struct process_v1)
GIVES_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", struct process_v2)
GIVES_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", struct process_v2)

EXPORTED enum code nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size)
{
    char path[LARGEST_VALUE], text[LARGEST_VALUE];
    enum code code = enter(__func__);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(name && size, INVALID_ARGUMENT);
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    REQUIRE(file >= 0, NOT_FOUND);
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length < 0 ? 0 : length] = '\0'; /* the first word of the command line ends with its NUL */
    snprintf(name, size, "%s", text);
    return SUCCESS;
}

static void memory_mib(const struct device *device, u64 *total, u64 *reserved, u64 *used)
{
    struct process found[MOST_PROCESSES];
    unsigned number = processes(device, NULL, found, MOST_PROCESSES);
    *total = number_or(of(device, "memory_total_mib"), 0);
    *reserved = number_or(of(device, "memory_reserved_mib"), 0);
    *used = number_or(of(device, "memory_used_mib"), 0);
    for (unsigned index = 0; index < number; index++)
        *used += found[index].mib;
    if (*used > *total - *reserved)
        *used = *total - *reserved;
}

EXPORTED enum code nvmlDeviceGetMemoryInfo(const struct device *device, struct memory *memory)
{
    u64 total, reserved, used;
    ENTER(device);
    REQUIRE(memory, INVALID_ARGUMENT);
    memory_mib(device, &total, &reserved, &used);
    /* The first version counts what the driver keeps for itself as used. */
    *memory = (struct memory){total << MIB_SHIFT, (total - reserved - used) << MIB_SHIFT, (reserved + used) << MIB_SHIFT};
    return SUCCESS;
}

EXPORTED enum code nvmlDeviceGetMemoryInfo_v2(const struct device *device, struct memory_v2 *memory)
{
    u64 total, reserved, used;
    ENTER(device);
    REQUIRE(memory, INVALID_ARGUMENT);
    REQUIRE(memory->version == (sizeof *memory | 2u << 24), ARGUMENT_VERSION_MISMATCH);
    memory_mib(device, &total, &reserved, &used);
    memory->total = total << MIB_SHIFT;
    memory->reserved = reserved << MIB_SHIFT;
    memory->free = (total - reserved - used) << MIB_SHIFT;
    memory->used = used << MIB_SHIFT;
    return SUCCESS;
}

/* ---- ECC and what it leads to ------------------------------------------------------------------------------------ */

enum { CORRECTED, UNCORRECTED, ERROR_TYPES };
enum { VOLATILE, AGGREGATE, COUNTERS };
static const char *const ERRORS[] = {"corrected", "uncorrected"};
static const char *const SINCE[] = {"volatile", "aggregate"};
/* NVML_MEMORY_LOCATION_*; cards since Ampere count dram and sram only. */
static const char *const LOCATIONS[] = {"l1_cache", "l2_cache", "dram", "register_file", "texture", "shared", "cbu", "sram"};
enum { LOCATION_COUNT = sizeof LOCATIONS / sizeof *LOCATIONS };

static u64 ecc_count(const struct device *device, unsigned type, unsigned counter, unsigned location)
{
    char name[LARGEST_VALUE];
    snprintf(name, sizeof name, "ecc/%s/%s/%s", SINCE[counter], ERRORS[type], LOCATIONS[location]);
    return number_or(of(device, name), 0);
}

static u64 ecc_total(const struct device *device, unsigned type, unsigned counter)
{
    u64 total = 0;
    for (unsigned location = 0; location < LOCATION_COUNT; location++)
        total += ecc_count(device, type, counter, location);
    return total;
}

/* Counts exist while ECC is on. */
static enum code ecc_counts(const struct device *device, unsigned type, unsigned counter, const void *to)
{
    REQUIRE(to && type < ERROR_TYPES && counter < COUNTERS, INVALID_ARGUMENT);
    return number_or(of(device, "ecc_current"), 0) ? SUCCESS : NOT_SUPPORTED;
}

EXPORTED enum code nvmlDeviceGetEccMode(const struct device *device, unsigned *current, unsigned *pending)
{
    ENTER(device);
    enum code code = give_number(device, "ecc_current", current);
    return code == SUCCESS ? give_number(device, "ecc_pending", pending) : code;
}

GIVES_NUMBER(nvmlDeviceGetDefaultEccMode, "ecc_default")

EXPORTED enum code nvmlDeviceGetTotalEccErrors(const struct device *device, unsigned type, unsigned counter, u64 *count)
{
    ENTER(device);
    enum code code = ecc_counts(device, type, counter, count);
    if (code == SUCCESS)
        *count = ecc_total(device, type, counter);
    return code;
}

EXPORTED enum code nvmlDeviceGetMemoryErrorCounter(const struct device *device, unsigned type, unsigned counter,
                                                   unsigned location, u64 *count)
{
    ENTER(device);
    enum code code = ecc_counts(device, type, counter, count);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(location < LOCATION_COUNT, INVALID_ARGUMENT);
    REQUIRE(strcmp(LOCATIONS[location], "dram") == 0 || strcmp(LOCATIONS[location], "sram") == 0, NOT_SUPPORTED);
    *count = ecc_count(device, type, counter, location);
    return SUCCESS;
}

EXPORTED enum code nvmlDeviceGetDetailedEccErrors(const struct device *device, unsigned type, unsigned counter, u64 *counts)
{
    ENTER(device);
    enum code code = ecc_counts(device, type, counter, counts);
    REQUIRE(code == SUCCESS, code);
    for (unsigned location = 0; location < 4; location++)
        counts[location] = ecc_count(device, type, counter, location);
    return SUCCESS;
}

/* Row remapping is told of the whole card only, which MIG hides. */
static enum code has_rows(const struct device *device)
{
    return number_or(of(device, "mig_current"), 0) ? NOT_SUPPORTED : SUCCESS;
}

EXPORTED enum code nvmlDeviceGetRemappedRows(const struct device *device, unsigned *correctable, unsigned *uncorrectable,
                                             unsigned *pending, unsigned *failure)
{
    ENTER(device);
    enum code code = has_rows(device);
    if (code == SUCCESS)
        code = give_number(device, "remapped_rows_correctable", correctable);
    if (code == SUCCESS)
        code = give_number(device, "remapped_rows_uncorrectable", uncorrectable);
    if (code == SUCCESS)
        code = give_number(device, "remapped_rows_pending", pending);
    return code == SUCCESS ? give_number(device, "remapped_rows_failure", failure) : code;
}

EXPORTED enum code nvmlDeviceGetRowRemapperHistogram(const struct device *device, struct histogram *banks)
{
    ENTER(device);
    REQUIRE(banks, INVALID_ARGUMENT);
    enum code code = has_rows(device);
    REQUIRE(code == SUCCESS, code);
    code = give_number(device, "remapper_banks_maximum", &banks->max);
    REQUIRE(code == SUCCESS, code);
    banks->high = (unsigned)number_or(of(device, "remapper_banks_high"), 0);
    banks->partial = (unsigned)number_or(of(device, "remapper_banks_partial"), 0);
    banks->low = (unsigned)number_or(of(device, "remapper_banks_low"), 0);
    banks->none = (unsigned)number_or(of(device, "remapper_banks_none"), 0);
    return SUCCESS;
}

GIVES_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages_pending")

/* A retired page is a file: its name is the address in hexadecimal, its content the time in microseconds since 1970. */
static enum code give_pages(const struct device *device, unsigned cause, unsigned *count, u64 *addresses, u64 *times)
{
    char name[LARGEST_VALUE], path[2 * LARGEST_PATH];
    unsigned number = 0, room;
    u64 address;
    REQUIRE(count && cause < 2, INVALID_ARGUMENT);
    REQUIRE(read_number(of(device, "retired_pages_pending"), &address) == SUCCESS, NOT_SUPPORTED);
    room = *count;
    snprintf(path, sizeof path, "%s/gpus/%d/retired_pages/%u", root, device->folder, cause);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (!parse(entry->d_name, 16, &address))
            continue;
        if (number < room && addresses) {
            addresses[number] = address;
            snprintf(name, sizeof name, "retired_pages/%u/%.64s", cause, entry->d_name);
            if (times)
                times[number] = number_or(of(device, name), 0);
        }
        number++;
    }
    if (folder)
        closedir(folder);
    *count = number;
    return number > room || (number && !addresses) ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORTED enum code nvmlDeviceGetRetiredPages_v2(const struct device *device, unsigned cause, unsigned *count,
                                                u64 *addresses, u64 *times)
{
    ENTER(device);
    return give_pages(device, cause, count, addresses, times);
}

EXPORTED enum code nvmlDeviceGetRetiredPages(const struct device *device, unsigned cause, unsigned *count, u64 *addresses)
{
    ENTER(device);
    return give_pages(device, cause, count, addresses, NULL);
}

/* ---- PCIe -------------------------------------------------------------------------------------------------------- */

GIVES_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
GIVES_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_maximum")
GIVES_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
GIVES_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_maximum")
GIVES_NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, "pcie_generation_maximum")
GIVES_NUMBER(nvmlDeviceGetPcieLinkMaxSpeed, "pcie_generation_maximum") /* NVML_PCIE_LINK_MAX_SPEED_* are 1, 2 … alike */
GIVES_NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie_replays")

EXPORTED enum code nvmlDeviceGetPcieSpeed(const struct device *device, unsigned *megabits)
{
    static const unsigned SPEEDS[] = {0, 2500, 5000, 8000, 16000, 32000, 64000};
    unsigned generation;
    ENTER(device);
    REQUIRE(megabits, INVALID_ARGUMENT);
    enum code code = give_number(device, "pcie_generation", &generation);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(generation < sizeof SPEEDS / sizeof *SPEEDS, UNKNOWN);
    *megabits = SPEEDS[generation];
    return SUCCESS;
}

EXPORTED enum code nvmlDeviceGetPcieThroughput(const struct device *device, unsigned counter, unsigned *kib_per_second)
{
    ENTER(device);
    REQUIRE(kib_per_second && counter < 2, INVALID_ARGUMENT);
    *kib_per_second = (unsigned)number_or(of(device, counter ? "pcie_rx_kib_per_second" : "pcie_tx_kib_per_second"), 0);
    return SUCCESS;
}

/* ---- temperature, power, clocks ---------------------------------------------------------------------------------- */

EXPORTED enum code nvmlDeviceGetTemperature(const struct device *device, unsigned sensor, unsigned *celsius)
{
    ENTER(device);
    REQUIRE(sensor == 0, INVALID_ARGUMENT);
    return give_number(device, "temperature_celsius", celsius);
}

EXPORTED enum code nvmlDeviceGetTemperatureV(const struct device *device, struct temperature_v1 *temperature)
{
    unsigned celsius;
    ENTER(device);
    REQUIRE(temperature, INVALID_ARGUMENT);
    REQUIRE(temperature->version == (sizeof *temperature | 1u << 24), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(temperature->sensor == 0, INVALID_ARGUMENT);
    enum code code = give_number(device, "temperature_celsius", &celsius);
    if (code == SUCCESS)
        temperature->temperature = (int)celsius;
    return code;
}

EXPORTED enum code nvmlDeviceGetTemperatureThreshold(const struct device *device, unsigned threshold, unsigned *celsius)
{
    static const char *const NAMES[] = {"shutdown", "slowdown", "memory_maximum", "maximum"};
    char name[LARGEST_VALUE];
    ENTER(device);
    REQUIRE(threshold < 8, INVALID_ARGUMENT);
    REQUIRE(threshold < sizeof NAMES / sizeof *NAMES, NOT_SUPPORTED); /* acoustic ones: boards with fans */
    snprintf(name, sizeof name, "temperature_%s_celsius", NAMES[threshold]);
    return give_number(device, name, celsius);
}

GIVES_NUMBER(nvmlDeviceGetPowerUsage, "power_milliwatts")
GIVES_NUMBER(nvmlDeviceGetPowerManagementLimit, "power_limit_milliwatts")
GIVES_NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_milliwatts")
GIVES_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_default_milliwatts")
GIVES_CONSTANT(nvmlDeviceGetPowerManagementMode, 1)
GIVES_NUMBER(nvmlDeviceGetPerformanceState, "performance_state")
GIVES_NUMBER(nvmlDeviceGetPowerState, "performance_state")
GIVES_NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
GIVES_NUMBER(nvmlDeviceGetPersistenceMode, "persistence")

EXPORTED enum code nvmlDeviceGetPowerManagementLimitConstraints(const struct device *device, unsigned *least, unsigned *most)
{
    ENTER(device);
    enum code code = give_number(device, "power_limit_minimum_milliwatts", least);
    return code == SUCCESS ? give_number(device, "power_limit_maximum_milliwatts", most) : code;
}

static enum code give_large(const struct device *device, const char *name, u64 *value)
{
    REQUIRE(value, INVALID_ARGUMENT);
    return read_number(of(device, name), value);
}

#define GIVES_LARGE_NUMBER(function, name)                             \
    EXPORTED enum code function(const struct device *device, u64 *value) \
    {                                                                  \
        ENTER(device);                                                 \
        return give_large(device, name, value);                        \
    }

GIVES_LARGE_NUMBER(nvmlDeviceGetTotalEnergyConsumption, "energy_millijoules")
GIVES_LARGE_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, "clocks_event_reasons")
GIVES_LARGE_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks_event_reasons")
GIVES_LARGE_NUMBER(nvmlDeviceGetSupportedClocksEventReasons, "clocks_event_reasons_supported")
GIVES_LARGE_NUMBER(nvmlDeviceGetSupportedClocksThrottleReasons, "clocks_event_reasons_supported")

static enum code give_clock(const struct device *device, unsigned type, const char *suffix, unsigned *mhz)
{
    /* The shaders' clock is the graphics clock on these cards. */
    static const char *const NAMES[] = {"graphics", "graphics", "memory", "video"};
    char name[LARGEST_VALUE];
    REQUIRE(type < sizeof NAMES / sizeof *NAMES, INVALID_ARGUMENT);
    snprintf(name, sizeof name, "clock_%s%s_mhz", NAMES[type], suffix);
    return give_number(device, name, mhz);
}

EXPORTED enum code nvmlDeviceGetClockInfo(const struct device *device, unsigned type, unsigned *mhz)
{
    ENTER(device);
    return give_clock(device, type, "", mhz);
}

EXPORTED enum code nvmlDeviceGetMaxClockInfo(const struct device *device, unsigned type, unsigned *mhz)
{
    ENTER(device);
    return give_clock(device, type, "_maximum", mhz);
}

EXPORTED enum code nvmlDeviceGetClock(const struct device *device, unsigned type, unsigned id, unsigned *mhz)
{
    ENTER(device);
    REQUIRE(id < 4, INVALID_ARGUMENT);
    return id == 0 || id == 3 ? give_clock(device, type, id ? "_maximum" : "", mhz) : NOT_SUPPORTED;
}

EXPORTED enum code nvmlDeviceGetUtilizationRates(const struct device *device, struct utilization *percent)
{
    ENTER(device);
    REQUIRE(percent, INVALID_ARGUMENT);
    enum code code = give_number(device, "utilization_gpu_percent", &percent->gpu);
    return code == SUCCESS ? give_number(device, "utilization_memory_percent", &percent->memory) : code;
}

/* A board without fans has no speed to tell. */
EXPORTED enum code nvmlDeviceGetFanSpeed(const struct device *device, unsigned *percent)
{
    ENTER(device);
    return give_number(device, "fan_speed_percent", percent);
}

EXPORTED enum code nvmlDeviceGetFanSpeed_v2(const struct device *device, unsigned fan, unsigned *percent)
{
    ENTER(device);
    REQUIRE(fan < number_or(of(device, "fans"), 0), INVALID_ARGUMENT);
    return give_number(device, "fan_speed_percent", percent);
}

/* ---- MIG --------------------------------------------------------------------------------------------------------- */

EXPORTED enum code nvmlDeviceGetMigMode(const struct device *device, unsigned *current, unsigned *pending)
{
    ENTER(device);
    enum code code = give_number(device, "mig_current", current);
    return code == SUCCESS ? give_number(device, "mig_pending", pending) : code;
}

EXPORTED enum code nvmlDeviceGetMaxMigDeviceCount(const struct device *device, unsigned *count)
{
    ENTER(device);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = (unsigned)number_or(of(device, "mig_devices_maximum"), 0);
    return SUCCESS;
}

/* ---- NVLink ------------------------------------------------------------------------------------------------------ */

static enum code check_link(const struct device *device, unsigned link)
{
    unsigned count = device->links;
    REQUIRE(count, NOT_SUPPORTED);
    return link < count ? SUCCESS : INVALID_ARGUMENT;
}

/* Most of what a link tells, it tells while it is up. */
static enum code check_active(const struct device *device, unsigned link)
{
    enum code code = check_link(device, link);
    REQUIRE(code == SUCCESS, code);
    return number_or(of_link(device, link, "state"), 0) ? SUCCESS : NOT_SUPPORTED;
}

static const char *const LINK_ERRORS[] = {"replay_errors", "recovery_errors", "crc_flit_errors", "crc_data_errors",
                                          "ecc_data_errors"};
enum { REPLAY, RECOVERY, CRC_FLIT, CRC_DATA, ECC_DATA, LINK_ERROR_COUNT };

EXPORTED enum code nvmlDeviceGetNvLinkState(const struct device *device, unsigned link, unsigned *active)
{
    ENTER(device);
    REQUIRE(active, INVALID_ARGUMENT);
    enum code code = check_link(device, link);
    if (code == SUCCESS)
        *active = number_or(of_link(device, link, "state"), 0) != 0;
    return code;
}

EXPORTED enum code nvmlDeviceGetNvLinkVersion(const struct device *device, unsigned link, unsigned *version)
{
    ENTER(device);
    enum code code = check_link(device, link);
    return code == SUCCESS ? give_number(device, "nvlink_version", version) : code;
}

EXPORTED enum code nvmlDeviceGetNvLinkCapability(const struct device *device, unsigned link, unsigned capability,
                                                 unsigned *has)
{
    ENTER(device);
    REQUIRE(has && capability < 6, INVALID_ARGUMENT);
    enum code code = check_link(device, link);
    if (code == SUCCESS)
        *has = capability == 0 || capability == 2 || capability == 5; /* peer to peer, its atomics, link is valid */
    return code;
}

EXPORTED enum code nvmlDeviceGetNvLinkErrorCounter(const struct device *device, unsigned link, unsigned counter, u64 *count)
{
    ENTER(device);
    REQUIRE(count && counter < LINK_ERROR_COUNT, INVALID_ARGUMENT);
    enum code code = check_active(device, link);
    if (code == SUCCESS)
        *count = number_or(of_link(device, link, LINK_ERRORS[counter]), 0);
    return code;
}

EXPORTED enum code nvmlDeviceGetNvLinkRemotePciInfo_v2(const struct device *device, unsigned link, struct pci_info *info)
{
    char address[LARGEST_VALUE], device_id[LARGEST_VALUE] = "";
    ENTER(device);
    enum code code = check_active(device, link);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(read_text(of_link(device, link, "remote_address"), address, sizeof address), UNKNOWN);
    read_text(of_link(device, link, "remote_device"), device_id, sizeof device_id);
    return give_pci(address, device_id, "", info);
}

EXPORTED enum code nvmlDeviceGetNvLinkRemoteDeviceType(const struct device *device, unsigned link, unsigned *type)
{
    ENTER(device);
    REQUIRE(type, INVALID_ARGUMENT);
    enum code code = check_active(device, link);
    if (code == SUCCESS)
        *type = number_or(of_link(device, link, "remote_is_switch"), 0) ? 2 : 0;
    return code;
}

/* ---- how cards are connected ------------------------------------------------------------------------------------- */

/* The bridge above a PCI function; 0 at the root complex. */
static int above(const char *address, char *bridge)
{
    char path[LARGEST_PATH];
    snprintf(path, sizeof path, "pci/%.32s/above", address);
    return read_text(path, bridge, LARGEST_VALUE) && *bridge;
}

static u64 numa_node(const struct device *device)
{
    return number_or(of(device, "numa_node"), 0);
}

EXPORTED enum code nvmlDeviceGetTopologyCommonAncestor(const struct device *one, const struct device *other, unsigned *level)
{
    enum { SINGLE_SWITCH = 10, HOST_BRIDGE = 30, NODE = 40, SYSTEM = 50 };
    char left[LARGEST_VALUE], right[LARGEST_VALUE], bridge[LARGEST_VALUE];
    ENTER(one);
    ENTER(other);
    REQUIRE(level, INVALID_ARGUMENT);
    REQUIRE(read_text(of(one, "pci_address"), left, sizeof left), UNKNOWN);
    REQUIRE(read_text(of(other, "pci_address"), right, sizeof right), UNKNOWN);
    while (above(left, bridge)) {
        strcpy(left, bridge);
        char candidate[LARGEST_VALUE];
        for (strcpy(candidate, right); above(candidate, bridge); strcpy(candidate, bridge))
            if (strcmp(bridge, left) == 0) {
                *level = SINGLE_SWITCH;
                return SUCCESS;
            }
    }
    while (above(right, bridge))
        strcpy(right, bridge);
    /* Root ports of one host bridge have the same bus number. */
    if (strncmp(left, right, strlen("0000:00")) == 0)
        *level = HOST_BRIDGE;
    else
        *level = numa_node(one) == numa_node(other) ? NODE : SYSTEM;
    return SUCCESS;
}

EXPORTED enum code nvmlDeviceGetP2PStatus(const struct device *one, const struct device *other, unsigned capability,
                                          unsigned *status)
{
    enum { BY_NVLINK = 2, CAPABILITIES = 5, OK = 0, NO = 5 };
    char address[LARGEST_VALUE], remote[LARGEST_VALUE];
    ENTER(one);
    ENTER(other);
    REQUIRE(status && capability <= CAPABILITIES, INVALID_ARGUMENT);
    *status = OK;
    if (capability != BY_NVLINK)
        return SUCCESS;
    *status = NO;
    REQUIRE(read_text(of(other, "pci_address"), address, sizeof address), UNKNOWN);
    for (unsigned link = 0; link < one->links; link++) {
        if (check_active(one, link) != SUCCESS)
            continue;
        if (number_or(of_link(one, link, "remote_is_switch"), 0) ||
            (read_text(of_link(one, link, "remote_address"), remote, sizeof remote) && strcmp(remote, address) == 0))
            *status = OK;
    }
    return SUCCESS;
}

/* ---- field values ------------------------------------------------------------------------------------------------ */

enum { TYPE_UNSIGNED = 1, TYPE_LARGE = 3 };

static enum code give_link_field(const struct device *device, unsigned link, const char *name, struct field_value *to)
{
    enum code code = check_active(device, link);
    if (code == SUCCESS)
        to->value.large = number_or(of_link(device, link, name), 0);
    return code;
}

static enum code give_link_total(const struct device *device, const char *name, struct field_value *to)
{
    unsigned count = device->links;
    REQUIRE(count, NOT_SUPPORTED);
    to->value.large = 0;
    for (unsigned link = 0; link < count; link++)
        to->value.large += number_or(of_link(device, link, name), 0);
    return SUCCESS;
}

static enum code give_link_speed(const struct device *device, unsigned link, struct field_value *to)
{
    enum code code = check_active(device, link);
    to->type = TYPE_UNSIGNED;
    return code == SUCCESS ? give_number(device, "nvlink_mb_per_second", &to->value.number) : code;
}

static enum code give_ecc_field(const struct device *device, unsigned type, unsigned counter, struct field_value *to)
{
    enum code code = ecc_counts(device, type, counter, to);
    if (code == SUCCESS)
        to->value.large = ecc_total(device, type, counter);
    return code;
}

/* Fields whose value is one file of the card, NVML_FI_DEV_* */
static const struct {
    unsigned field;
    unsigned type;
    const char *name;
} FIELDS[] = {
    {1, TYPE_UNSIGNED, "ecc_current"},
    {2, TYPE_UNSIGNED, "ecc_pending"},
    {31, TYPE_UNSIGNED, "retired_pages_pending"},
    {82, TYPE_UNSIGNED, "temperature_memory_celsius"},
    {83, TYPE_LARGE, "energy_millijoules"},
    {90, TYPE_UNSIGNED, "nvlink_mb_per_second"},
    {94, TYPE_UNSIGNED, "pcie_replays"},
    {142, TYPE_UNSIGNED, "remapped_rows_correctable"},
    {143, TYPE_UNSIGNED, "remapped_rows_uncorrectable"},
    {144, TYPE_UNSIGNED, "remapped_rows_pending"},
    {145, TYPE_UNSIGNED, "remapped_rows_failure"},
    {185, TYPE_UNSIGNED, "power_milliwatts"},
    {186, TYPE_UNSIGNED, "power_milliwatts"},
    {187, TYPE_UNSIGNED, "power_limit_minimum_milliwatts"},
    {188, TYPE_UNSIGNED, "power_limit_maximum_milliwatts"},
    {189, TYPE_UNSIGNED, "power_limit_default_milliwatts"},
    {190, TYPE_UNSIGNED, "power_limit_milliwatts"},
    {192, TYPE_UNSIGNED, "power_limit_milliwatts"},
    {230, TYPE_UNSIGNED, "recovery_action"},
};

/* Error counters of links 0 to 5 with their total, and of links 6 to 11: the field of the first one. */
static const struct {
    unsigned first, seventh;
    unsigned error;
} LINK_FIELDS[] = {{32, 96, CRC_FLIT}, {39, 102, CRC_DATA}, {46, 108, REPLAY}, {53, 114, RECOVERY}};

static enum code give_field(const struct device *device, struct field_value *to)
{
    unsigned field = to->field, link = to->scope;
    to->type = TYPE_LARGE;
    if (field >= 3 && field <= 6)
        return give_ecc_field(device, (field - 3) % 2, (field - 3) / 2, to);
    if (field >= 84 && field <= 89)
        return give_link_speed(device, field - 84, to);
    if (field >= 132 && field <= 137)
        return give_link_speed(device, 6 + field - 132, to);
    if (field >= 148 && field <= 159)
        return give_link_field(device, field - 148, LINK_ERRORS[ECC_DATA], to);
    for (size_t index = 0; index < sizeof LINK_FIELDS / sizeof *LINK_FIELDS; index++) {
        const char *name = LINK_ERRORS[LINK_FIELDS[index].error];
        if (field >= LINK_FIELDS[index].first && field < LINK_FIELDS[index].first + 6)
            return give_link_field(device, field - LINK_FIELDS[index].first, name, to);
        if (field == LINK_FIELDS[index].first + 6)
            return give_link_total(device, name, to);
        if (field >= LINK_FIELDS[index].seventh && field < LINK_FIELDS[index].seventh + 6)
            return give_link_field(device, 6 + field - LINK_FIELDS[index].seventh, name, to);
    }
    switch (field) {
    case 91:
        to->type = TYPE_UNSIGNED;
        to->value.number = device->links;
        return SUCCESS;
    case 160:
        return give_link_total(device, LINK_ERRORS[ECC_DATA], to);
    case 161:
        return give_link_field(device, link, LINK_ERRORS[REPLAY], to);
    case 162:
        return give_link_field(device, link, LINK_ERRORS[RECOVERY], to);
    case 163:
        return give_link_field(device, link, LINK_ERRORS[CRC_FLIT], to);
    case 164:
        return give_link_speed(device, link, to);
    case 165: {
        enum code code = check_link(device, link);
        to->type = TYPE_UNSIGNED;
        if (code == SUCCESS)
            to->value.number = number_or(of_link(device, link, "state"), 0) != 0;
        return code;
    }
    case 166: {
        enum code code = check_link(device, link);
        to->type = TYPE_UNSIGNED;
        return code == SUCCESS ? give_number(device, "nvlink_version", &to->value.number) : code;
    }
    default:
        break;
    }
    for (size_t index = 0; index < sizeof FIELDS / sizeof *FIELDS; index++)
        if (FIELDS[index].field == field) {
            to->type = FIELDS[index].type;
            return FIELDS[index].type == TYPE_LARGE ? give_large(device, FIELDS[index].name, &to->value.large)
                                                    : give_number(device, FIELDS[index].name, &to->value.number);
        }
    return NOT_SUPPORTED;
}

EXPORTED enum code nvmlDeviceGetFieldValues(const struct device *device, int count, struct field_value *values)
{
    ENTER(device);
    REQUIRE(values && count >= 0, INVALID_ARGUMENT);
    for (int index = 0; index < count; index++) {
        struct timeval now;
        gettimeofday(&now, NULL);
        values[index].timestamp = now.tv_sec * 1000000LL + now.tv_usec;
        values[index].latency_microseconds = 0;
        values[index].value.large = 0;
        values[index].code = give_field(device, &values[index]);
    }
    return SUCCESS;
}

/* ---- changing a card: root only ---------------------------------------------------------------------------------- */

#define ROOT_ONLY() REQUIRE(geteuid() == 0, NO_PERMISSION)

static enum code switch_mode(const struct device *device, const char *name, unsigned mode, unsigned most)
{
    u64 present;
    enum code code = read_number(of(device, name), &present);
    REQUIRE(code == SUCCESS, code);
    REQUIRE(mode <= most, INVALID_ARGUMENT);
    ROOT_ONLY();
    return write_number(of(device, name), mode);
}

EXPORTED enum code nvmlDeviceSetEccMode(const struct device *device, unsigned mode)
{
    ENTER(device);
    return switch_mode(device, "ecc_pending", mode, 1); /* it becomes the current one at the next reset or boot */
}

EXPORTED enum code nvmlDeviceSetPersistenceMode(const struct device *device, unsigned mode)
{
    ENTER(device);
    return switch_mode(device, "persistence", mode, 1);
}

EXPORTED enum code nvmlDeviceSetComputeMode(const struct device *device, unsigned mode)
{
    ENTER(device);
    return switch_mode(device, "compute_mode", mode, 3);
}

EXPORTED enum code nvmlDeviceSetPowerManagementLimit(const struct device *device, unsigned milliwatts)
{
    ENTER(device);
    REQUIRE(milliwatts >= number_or(of(device, "power_limit_minimum_milliwatts"), 0), INVALID_ARGUMENT);
    return switch_mode(device, "power_limit_milliwatts", milliwatts,
                       (unsigned)number_or(of(device, "power_limit_maximum_milliwatts"), 0));
}

EXPORTED enum code nvmlDeviceClearEccErrorCounts(const struct device *device, unsigned counter)
{
    char name[LARGEST_VALUE];
    ENTER(device);
    REQUIRE(counter < COUNTERS, INVALID_ARGUMENT);
    REQUIRE(number_or(of(device, "ecc_current"), 0), NOT_SUPPORTED);
    ROOT_ONLY();
    for (unsigned type = 0; type < ERROR_TYPES; type++)
        for (unsigned location = 0; location < LOCATION_COUNT; location++) {
            snprintf(name, sizeof name, "ecc/%s/%s/%s", SINCE[counter], ERRORS[type], LOCATIONS[location]);
            if (number_or(of(device, name), 0) && write_number(of(device, name), 0) != SUCCESS)
                return UNKNOWN;
        }
    return SUCCESS;
}

EXPORTED enum code nvmlDeviceResetNvLinkErrorCounters(const struct device *device, unsigned link)
{
    ENTER(device);
    enum code code = check_link(device, link);
    REQUIRE(code == SUCCESS, code);
    ROOT_ONLY();
    for (unsigned error = 0; error < LINK_ERROR_COUNT; error++)
        if (number_or(of_link(device, link, LINK_ERRORS[error]), 0) &&
            write_number(of_link(device, link, LINK_ERRORS[error]), 0) != SUCCESS)
            return UNKNOWN;
    return SUCCESS;
}
