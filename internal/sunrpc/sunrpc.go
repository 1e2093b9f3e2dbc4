// Package sunrpc pings an RPC program of a server and finds the port of a program. It implements
// ONC RPC version 2 over TCP (RFC 5531) in user space, so that a call to a server that does not answer times
// out and does not block a thread. It sends no credentials and makes no other calls.
package sunrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"time"
)

// Programs (RFC 5531, section 13).
const (
	PortmapProgram = 100000
	NFSProgram     = 100003
	StatusProgram  = 100024 // rpc.statd
)

// Protocols as the portmapper numbers them (RFC 1833, section 3).
const (
	TCP = 6
	UDP = 17
)

// ErrMalformed means that the received data is not a reply to the call.
var ErrMalformed = errors.New("no well-formed RPC reply")

// errRefused means that the server answered but did not execute the call.
var errRefused = errors.New("the RPC was not accepted")

const (
	rpcVersion     = 2
	portmapVersion = 2
	getPort        = 3       // PMAPPROC_GETPORT
	lastFragment   = 1 << 31 // flag in the length of a fragment (RFC 5531, section 11)
	maxReply       = 4096    // bytes
)

// Ping makes the NULL call of a program at address (host:port). It succeeds for every well-formed
// reply, also for a refusal. It fails if no RPC reply arrives before ctx ends.
func Ping(ctx context.Context, address string, program, version uint32) error {
	_, err := call(ctx, address, program, version, 0)
	if errors.Is(err, errRefused) {
		return nil
	}
	return err
}

// Port requests the port of a program over proto (TCP or UDP) from the portmapper at address (host:port), by
// PMAPPROC_GETPORT (RFC 1833, section 3). It returns 0 if the program is not registered.
func Port(ctx context.Context, address string, program, version, proto uint32) (int, error) {
	result, err := call(ctx, address, PortmapProgram, portmapVersion, getPort, program, version, proto, 0)
	if err != nil {
		return 0, err
	}
	if len(result) < 4 {
		return 0, fmt.Errorf("the portmapper at %s: %w", address, ErrMalformed)
	}
	port := binary.BigEndian.Uint32(result)
	if port > 65535 {
		return 0, fmt.Errorf("the portmapper at %s returned port %d: %w", address, port, ErrMalformed)
	}
	return int(port), nil
}

// call makes one call and returns the reply without its header.
func call(ctx context.Context, address string, program, version, procedure uint32, args ...uint32) ([]byte, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	result, err := exchange(conn, program, version, procedure, args)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("calling RPC program %d at %s: %w", program, address, err)
	}
	return result, nil
}

// exchange sends a call and reads its reply.
func exchange(conn io.ReadWriter, program, version, procedure uint32, args []uint32) ([]byte, error) {
	xid := rand.Uint32()
	if _, err := conn.Write(callRecord(xid, program, version, procedure, args)); err != nil {
		return nil, err
	}
	record, err := readRecord(conn)
	if err != nil {
		return nil, err
	}
	return parseReply(record, xid)
}

// callRecord encodes a call with AUTH_NONE (RFC 5531, section 9) in one fragment (section 11).
func callRecord(xid, program, version, procedure uint32, args []uint32) []byte {
	words := append([]uint32{xid, 0, rpcVersion, program, version, procedure, 0, 0, 0, 0}, args...)
	record := binary.BigEndian.AppendUint32(nil, lastFragment|uint32(4*len(words)))
	for _, w := range words {
		record = binary.BigEndian.AppendUint32(record, w)
	}
	return record
}

// readRecord reads the fragments of a record, at most maxReply bytes.
func readRecord(r io.Reader) ([]byte, error) {
	var record []byte
	for range maxReply {
		var header [4]byte
		if _, err := io.ReadFull(r, header[:]); err != nil {
			return nil, err
		}
		mark := binary.BigEndian.Uint32(header[:])
		size := int(mark &^ lastFragment)
		if size > maxReply-len(record) {
			return nil, fmt.Errorf("a fragment of %d bytes: %w", size, ErrMalformed)
		}
		fragment := make([]byte, size)
		if _, err := io.ReadFull(r, fragment); err != nil {
			return nil, err
		}
		record = append(record, fragment...)
		if mark&lastFragment != 0 {
			return record, nil
		}
	}
	return nil, ErrMalformed
}

// parseReply returns the results of a successful call (RFC 5531, section 9). It returns errRefused if the
// server did not execute the call.
func parseReply(record []byte, xid uint32) ([]byte, error) {
	r := bytes.NewReader(record)
	var reply struct{ XID, Kind, Denied uint32 }
	if err := binary.Read(r, binary.BigEndian, &reply); err != nil || reply.XID != xid || reply.Kind != 1 || reply.Denied > 1 {
		return nil, ErrMalformed
	}
	if reply.Denied == 1 {
		return nil, errRefused
	}
	var verifier struct{ Flavor, Size uint32 }
	err := binary.Read(r, binary.BigEndian, &verifier)
	padded := (int64(verifier.Size) + 3) &^ 3
	if err != nil || padded > int64(r.Len()) {
		return nil, ErrMalformed
	}
	var status uint32
	_, err = r.Seek(padded, io.SeekCurrent)
	if err = errors.Join(err, binary.Read(r, binary.BigEndian, &status)); err != nil {
		return nil, ErrMalformed
	}
	if status != 0 {
		return nil, fmt.Errorf("%w (accept_stat %d)", errRefused, status)
	}
	return record[len(record)-r.Len():], nil
}
