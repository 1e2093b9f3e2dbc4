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

// reply returns a record in fragments of words, and puts the xid of the call before the first one. The other words of
// a successful reply are the message type 1, the status 0, flavor and length of the verifier, the accept status 0,
// and the result (RFC 5531, section 9).
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

// serve listens on a TCP port, and answers one call with the bytes that answer returns for the call's xid. It
// keeps the connection open until the caller closes it.
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
		call := make([]byte, 4+10*4) // the length of the fragment, and the header of the call
		if _, err := io.ReadFull(conn, call); err != nil {
			return
		}
		if _, err := conn.Write(answer(binary.BigEndian.Uint32(call[4:]))); err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, conn)
	}()
	return l.Addr().String()
}

// TestPing: every well-formed reply is a success, also a refusal.
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
		{"reply to another call", func(x uint32) []byte { return reply(x+1, []uint32{1, 0, 0, 0, 0}) }, ErrMalformed},
		{"call instead of a reply", func(x uint32) []byte { return reply(x, []uint32{0, 0, 0, 0, 0}) }, ErrMalformed},
		{"truncated reply", func(x uint32) []byte { return reply(x, []uint32{1}) }, ErrMalformed},
		{"verifier longer than the reply", func(x uint32) []byte { return reply(x, []uint32{1, 0, 0, 0xffffffff, 0}) }, ErrMalformed},
		{"HTTP", func(uint32) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") }, ErrMalformed},
		{"no answer", func(uint32) []byte { return nil }, context.DeadlineExceeded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if err := Ping(ctx, serve(t, tc.answer), NFSProgram, 4); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

// TestPingWithoutServer: a ping fails if no server listens at the address, or if the context has ended.
func TestPingWithoutServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	if err := Ping(t.Context(), l.Addr().String(), NFSProgram, 4); err == nil {
		t.Error("a ping without a server: got no error, want one")
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Ping(canceled, l.Addr().String(), NFSProgram, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled context: got %v, want context.Canceled", err)
	}
}

// TestPort: Port returns the port of a registered program, and refuses malformed replies.
func TestPort(t *testing.T) {
	for _, tc := range []struct {
		name  string
		reply []uint32
		want  int
		err   error
	}{
		{"registered", []uint32{1, 0, 0, 0, 0, 20048}, 20048, nil},
		{"not registered", []uint32{1, 0, 0, 0, 0, 0}, 0, nil},
		{"port over 65535", []uint32{1, 0, 0, 0, 0, 70000}, 0, ErrMalformed},
		{"reply without a port", []uint32{1, 0, 0, 0, 0}, 0, ErrMalformed},
		{"program unavailable", []uint32{1, 0, 0, 0, 1}, 0, errRefused},
	} {
		t.Run(tc.name, func(t *testing.T) {
			address := serve(t, func(x uint32) []byte { return reply(x, tc.reply) })
			port, err := Port(t.Context(), address, StatusProgram, 1, UDP)
			if port != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("got port %d, %v, want %d, %v", port, err, tc.want, tc.err)
			}
		})
	}
}

// FuzzReply: all received data is parsed or refused, and no result is longer than the data.
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
			t.Fatalf("got a record of %d bytes from %d bytes", len(record), len(data))
		}
		result, err := parseReply(record, 1)
		const header = 24 // bytes of the header of a successful reply
		if err == nil && len(result) > len(record)-header {
			t.Errorf("got a result of %d bytes from a record of %d bytes", len(result), len(record))
		}
		if err != nil && !errors.Is(err, ErrMalformed) && !errors.Is(err, errRefused) {
			t.Errorf("got %v, want ErrMalformed or errRefused", err)
		}
	})
}
