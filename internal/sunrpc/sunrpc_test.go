package sunrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// reply returns a record in fragments of words. The first word is the xid of the call.
func reply(xid uint32, fragments ...[]uint32) []byte {
	var out []byte
	for i, words := range fragments {
		if i == 0 {
			words = append([]uint32{xid}, words...)
		}
		mark := uint32(4 * len(words))
		if i == len(fragments)-1 {
			mark |= lastFragment
		}
		out = binary.BigEndian.AppendUint32(out, mark)
		for _, w := range words {
			out = binary.BigEndian.AppendUint32(out, w)
		}
	}
	return out
}

// serve answers one call on a TCP port with the reply that answer returns for its xid, and then keeps the
// connection.
func serve(t *testing.T, answer func(xid uint32) []byte) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		call := make([]byte, 44)
		if _, err := io.ReadFull(conn, call); err != nil {
			return
		}
		if _, err := conn.Write(answer(binary.BigEndian.Uint32(call[4:]))); err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, conn) // until the caller closes the connection
	}()
	return l.Addr().String()
}

func TestPing(t *testing.T) {
	for _, tc := range []struct {
		name   string
		answer func(xid uint32) []byte
		want   error
	}{
		{"success", func(x uint32) []byte { return reply(x, []uint32{1, 0, 0, 0, 0}) }, nil},
		{"verifier", func(x uint32) []byte { return reply(x, []uint32{1, 0, 6, 5, 7, 7, 0}) }, nil},
		{"two fragments", func(x uint32) []byte { return reply(x, []uint32{1, 0}, []uint32{0, 0, 0}) }, nil},
		{"program mismatch", func(x uint32) []byte { return reply(x, []uint32{1, 0, 0, 0, 2, 3, 4}) }, nil},
		{"denied", func(x uint32) []byte { return reply(x, []uint32{1, 1, 1, 5}) }, nil},
		{"other call", func(x uint32) []byte { return reply(x+1, []uint32{1, 0, 0, 0, 0}) }, ErrMalformed},
		{"no reply", func(x uint32) []byte { return reply(x, []uint32{0, 0, 0, 0, 0}) }, ErrMalformed},
		{"short", func(x uint32) []byte { return reply(x, []uint32{1}) }, ErrMalformed},
		{"long verifier", func(x uint32) []byte { return reply(x, []uint32{1, 0, 0, 0xffffffff, 0}) }, ErrMalformed},
		{"no RPC", func(uint32) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") }, ErrMalformed},
		{"silent", func(uint32) []byte { return nil }, context.DeadlineExceeded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if err := Ping(ctx, serve(t, tc.answer), NFSProgram, 4); !errors.Is(err, tc.want) {
				t.Errorf("%v, want %v", err, tc.want)
			}
		})
	}
}

func TestPingWithoutServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	if err := Ping(t.Context(), l.Addr().String(), NFSProgram, 4); err == nil {
		t.Error("a ping without a server succeeded")
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Ping(cancelled, l.Addr().String(), NFSProgram, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}

func TestPort(t *testing.T) {
	for _, tc := range []struct {
		name string
		port uint32
		rest []uint32
		want int
		err  error
	}{
		{"registered", 0, []uint32{1, 0, 0, 0, 0, 20048}, 20048, nil},
		{"not registered", 0, []uint32{1, 0, 0, 0, 0, 0}, 0, nil},
		{"too high", 0, []uint32{1, 0, 0, 0, 0, 70000}, 0, ErrMalformed},
		{"no port", 0, []uint32{1, 0, 0, 0, 0}, 0, ErrMalformed},
		{"no portmapper", 0, []uint32{1, 0, 0, 0, 1}, 0, errRefused},
	} {
		t.Run(tc.name, func(t *testing.T) {
			address := serve(t, func(x uint32) []byte { return reply(x, tc.rest) })
			port, err := Port(t.Context(), address, StatusProgram, 1, UDP)
			if port != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("%d, %v", port, err)
			}
		})
	}
}

// FuzzReply: any received data is parsed or refused within bounds.
func FuzzReply(f *testing.F) {
	f.Add(reply(1, []uint32{1, 0, 0, 0, 0, 7}))
	f.Add(reply(1, []uint32{1, 1, 0}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, data []byte) {
		record, err := readRecord(bytes.NewReader(data))
		if err != nil {
			return
		}
		if len(record) > maxReply || len(record) > len(data) {
			t.Fatalf("%d bytes of %d", len(record), len(data))
		}
		result, err := parseReply(record, 1)
		if err == nil && len(result) > len(record)-20 {
			t.Errorf("%d bytes of results in a record of %d", len(result), len(record))
		}
		if err != nil && !errors.Is(err, ErrMalformed) && !errors.Is(err, errRefused) {
			t.Error(err)
		}
	})
}
