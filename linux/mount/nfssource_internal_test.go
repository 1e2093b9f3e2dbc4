package mount

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
)

// TestSourceAttributes: Attributes combines the attributes of the source with those of its argument.
func TestSourceAttributes(t *testing.T) {
	for _, tc := range []struct {
		source Source
		flags  string
		want   string
	}{
		{&NFSSource{}, "noexec", "noexec"},
		{&NFSSource{NFS: NFS{Options: []string{"hard,noatime", "nosuid"}}}, "noexec,noatime", "noatime,nosuid,noexec"},
		{&MemorySource{}, "noexec", "nosuid,nodev,noexec"},
	} {
		flags, err := ParseFlags([]string{tc.flags})
		if err != nil {
			t.Fatal(err)
		}
		want, err := ParseFlags([]string{tc.want})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tc.source.Attributes(flags); err != nil || got.Attr != want.Attr {
			t.Errorf("%+v with %s: got %+v, %v, want %s", tc.source, tc.flags, got, err, tc.want)
		}
	}
}

// TestAbandonMount: only a mount whose own server does not respond is abandoned.
func TestAbandonMount(t *testing.T) {
	undecided := errors.New("not now")
	responding, silent := entryAt(serve(t)), entryAt(closed(t))
	for _, tc := range []struct {
		name    string
		abandon Abandon
		e       *Entry
		force   bool
		err     error
	}{
		{"nil Abandon", nil, silent, false, nil},
		{"not to abandon, server silent", func() (bool, error) { return false, nil }, silent, false, nil},
		{"to abandon, server silent", func() (bool, error) { return true, nil }, silent, true, nil},
		{"to abandon, server responds", func() (bool, error) { return true, nil }, responding, false, nil},
		{"error, server silent", func() (bool, error) { return false, undecided }, silent, false, undecided},
		{"error, server responds", func() (bool, error) { return false, undecided }, responding, false, nil},
		{"to abandon, not an NFS mount", func() (bool, error) { return true, nil }, &Entry{FSType: "ext4"}, true, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if force, err := abandonMount(t.Context(), tc.e, tc.abandon); force != tc.force || !errors.Is(err, tc.err) {
				t.Errorf("got %t, %v, want %t, %v", force, err, tc.force, tc.err)
			}
		})
	}
}

// entryAt returns the mount table entry of an NFS mount from a server at a port of this node.
func entryAt(address net.Addr) *Entry {
	return &Entry{FSType: "nfs4", VFSOptions: fmt.Sprintf("vers=4.2,port=%d,addr=127.0.0.1", address.(*net.TCPAddr).Port)}
}

// closed returns the address of a port on which no process listens.
func closed(t *testing.T) net.Addr {
	t.Helper()
	l := listen(t)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return l.Addr()
}

// listen returns a listener at a free port of this node.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// serve runs a server that replies to NULL calls of RPC (RFC 5531, section 9).
func serve(t *testing.T) net.Addr {
	t.Helper()
	l := listen(t)
	go func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			answer(conn)
		}
	}()
	return l.Addr()
}

// answer replies to one NULL call, and closes the connection.
func answer(conn net.Conn) {
	defer conn.Close() //nolint:errcheck // only the reply matters
	var head [8]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return
	}
	reply := binary.BigEndian.AppendUint32(nil, 1<<31|24) // the last fragment, of 24 bytes
	reply = append(reply, head[4:]...)                    // the ID of the call
	for _, word := range []uint32{1, 0, 0, 0, 0} {        // a reply, accepted, without authentication (2 words), success
		reply = binary.BigEndian.AppendUint32(reply, word)
	}
	_, _ = conn.Write(reply)
}
