package nfsd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// captureBuffer holds all packets between Capture and found.
const captureBuffer = 64 << 20

// Capture records the packets of the link. found ends it, and reports whether one of the packets contains a text.
func (l *Link) Capture(tb testing.TB) (found func(text string) bool) {
	tb.Helper()
	fd, err := l.packetSocket()
	if err != nil {
		tb.Fatal(err)
	}
	return func(text string) (found bool) {
		tb.Helper()
		defer unix.Close(fd)
		buf := make([]byte, 1<<17) // more than a packet, whose segments the link does not separate
		for {
			n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				tb.Fatal(err)
			}
			found = found || bytes.Contains(buf[:n], []byte(text))
		}
		stats, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil || stats.Packets == 0 || stats.Drops > 0 {
			tb.Errorf("captured packets: got %+v, %v, want some and no drops", stats, err)
		}
		return found
	}
}

// packetSocket opens a packet(7) socket in the network namespace of the client.
func (l *Link) packetSocket() (fd int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so that the thread ends with this goroutine
		var ns *os.File
		if ns, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", l.pid)); err != nil {
			return
		}
		defer ns.Close()
		if err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return
		}
		all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all)); err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer)
		}
	}()
	<-done
	return fd, err
}
