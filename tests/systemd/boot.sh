#!/usr/bin/env bash
# Boot this machine's own systemd as PID 1 of fresh namespaces, over a throw-away overlay of /, and run one
# script in it. Nothing outside is changed; root only.
#
#   boot.sh [-m] [-t SECONDS] [-v SOURCE:TARGET]... [-r PATH]... OUT SCRIPT
#     -m  units can have memory limits, also where the kernel's control groups are those of version 1
#     -v  a directory of this machine that the guest shares, read-write
#     -r  a path that the guest's plain users must be able to reach (their right to pass its parents is given there)
#     OUT gets test.out, journal.txt and console.txt; SCRIPT's exit code is ours, 70 if it gave none
#     SIGTERM and Ctrl-C end the guest at once, and 130 is the exit code
set -euo pipefail

limit=120 binds=() reach=() memory=
while getopts mt:v:r: option; do
    case $option in
        m) memory=1 ;;
        t) limit=$OPTARG ;;
        v) binds+=("$OPTARG") ;;
        r) reach+=("$OPTARG") ;;
        *) exit 64 ;;
    esac
done
shift $((OPTIND - 1))
out=$(realpath "$1") script=$(realpath "$2")
work=$(mktemp -d /tmp/pyengine-boot.XXXXXX)
group=pyengine-boot-$$
systemd=/lib/systemd/systemd
[ -x "$systemd" ] || systemd=/usr/lib/systemd/systemd

# Only the hierarchies that systemd itself needs: a freezer or limits of ours go on holding the guest.
hierarchies=()
for name in systemd unified; do
    if mountpoint -q "/sys/fs/cgroup/$name"; then hierarchies+=("/sys/fs/cgroup/$name"); fi
done
if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then
    hierarchies=(/sys/fs/cgroup) memory=
elif [ -n "$memory" ]; then # below our own group, whose limit goes on holding the guest
    memory=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)
    [ -d "$memory" ] || memory=/sys/fs/cgroup/memory
    hierarchies+=("$memory")
fi

clean_up() {
    umount -l "$work/root" "$work/overlay" 2>/dev/null || true
    for hierarchy in "${hierarchies[@]}"; do
        for step in $(seq 100); do # a guest that was killed takes a moment to be gone
            [ -d "$hierarchy/$group" ] || break
            find "$hierarchy/$group" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.05
        done
    done
    rm -rf --one-file-system "$work"
}
trap clean_up EXIT

mkdir "$work/overlay" "$work/root"
mount -t tmpfs -o size=2g,mode=755 overlay "$work/overlay"
mkdir "$work/overlay/upper" "$work/overlay/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/overlay/upper,workdir=$work/overlay/work" "$work/root"
root=$work/root units=$work/root/etc/systemd/system

# What this machine would start by itself stays out.
rm -rf "$units"/*.wants "$units"/*.requires
mkdir -p "$units" "$root/guest" "$root/etc/pyengine"
for name in timesyncd networkd resolved udevd udev-trigger modules-load sysctl binfmt remount-fs hwdb-update update-utmp \
    logind firstboot random-seed pstore boot-system-token tmpfiles-setup-dev sysusers; do
    ln -sf /dev/null "$units/systemd-$name.service"
done
for name in dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount \
    sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.automount systemd-udevd-control.socket \
    systemd-udevd-kernel.socket tmp.mount kmod-static-nodes.service ldconfig.service; do
    ln -sf /dev/null "$units/$name"
done
: > "$root/etc/fstab"
rm -f "$root/etc/machine-id"
printf '%032x\n' $$ > "$root/etc/machine-id"
printf '[Manager]\nLogColor=no\nShowStatus=no\n' > "$root/etc/systemd/system.conf"
printf '[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\nReadKMsg=no\n' > "$root/etc/systemd/journald.conf"
for path in "${reach[@]+"${reach[@]}"}"; do
    while [ "$path" != / ]; do
        path=$(dirname "$path")
        chmod a+rx "$root$path"
    done
done
install -m 755 "$script" "$root/guest/test"
cat > "$root/guest/run" <<'END'
#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /guest
./test > test.out 2>&1
echo $? > code
journalctl -o short-monotonic --no-pager > journal.txt 2>&1
systemctl exit "$(cat code)"
END
chmod 755 "$root/guest/run"
cat > "$units/guest.service" <<'END'
[Unit]
After=basic.target
Requires=basic.target
[Service]
Type=exec
ExecStart=/guest/run
END
printf '[Unit]\nRequires=basic.target guest.service\nAfter=basic.target\n' > "$units/guest.target"

cat > "$work/init" <<'END'
set -e
root=$1 systemd=$2 console=$3 memory=$4; shift 4
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
    mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
    mkdir "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/unified"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
    if [ -n "$memory" ]; then
        mkdir "$root/sys/fs/cgroup/memory"
        mount -t cgroup -o memory cgroup "$root/sys/fs/cgroup/memory"
    fi
fi
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
if [ -e /dev/loop-control ]; then
    mknod -m 600 "$root/dev/loop-control" c 10 237
    for number in $(seq 0 63); do mknod -m 600 "$root/dev/loop$number" b 7 "$number"; done
fi
mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t mqueue mqueue "$root/dev/mqueue"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"; ln -s fd/1 "$root/dev/stdout"; ln -s fd/2 "$root/dev/stderr"
touch "$root/dev/console"
exec 3>> "$console"
mount --bind "$console" "$root/dev/console"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for bind in "$@"; do
    mkdir -p "$root${bind#*:}"
    mount --rbind "${bind%%:*}" "$root${bind#*:}"
done
hostname guest
cd "$root"
mkdir -p guest/old
pivot_root . guest/old
umount -l /guest/old
exec env -i container=pyengine-boot PATH=/usr/sbin:/usr/bin:/sbin:/bin "$systemd" --system --unit=guest.target </dev/null >&3 2>&3
END
: > "$out/console.txt"
(
    for hierarchy in "${hierarchies[@]}"; do
        mkdir -p "$hierarchy/$group"
        echo "$BASHPID" > "$hierarchy/$group/cgroup.procs"
    done
    exec timeout -s KILL "$limit" unshare --fork --kill-child --pid --mount --uts --ipc --cgroup \
        bash "$work/init" "$root" "$systemd" "$out/console.txt" "$memory" "${binds[@]+"${binds[@]}"}"
) &
guest=$!
# unshare takes SIGKILL alone, and the guest's PID 1 goes with it.
trap 'kill -KILL $(cat "/proc/$guest/task/$guest/children") 2>/dev/null || true; wait "$guest" 2>/dev/null || true; exit 130' INT TERM
wait "$guest" || true
trap - INT TERM
for name in test.out journal.txt code; do
    if [ -e "$work/overlay/upper/guest/$name" ]; then cp "$work/overlay/upper/guest/$name" "$out/"; fi
done
cat "$out/test.out" 2>/dev/null || true
[ -e "$out/code" ] || { echo "the guest gave no result, see $out/console.txt" >&2; exit 70; }
exit "$(cat "$out/code")"
