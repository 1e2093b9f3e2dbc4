package clone

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
)

// inodeSet is a set of inode numbers in a file, because a tree can have any number of files with several names. It is a hash
// table of 8 bytes for each slot; a slot with 0 is free.
type inodeSet struct {
	file *os.File
	// at is the offset of the table in the file. slots is a power of two.
	at, slots, used int64
}

const firstSlots = 1 << 12

// add adds an inode number, and reports whether the set has it already.
func (s *inodeSet) add(inode uint64) (found bool, err error) {
	if s.slots == 0 {
		s.slots = firstSlots
	}
	if 2*s.used >= s.slots {
		if err := s.grow(); err != nil {
			return false, err
		}
	}
	found, err = s.insert(inode)
	if err == nil && !found {
		s.used++
	}
	return found, err
}

// insert is add for a table with free slots.
func (s *inodeSet) insert(inode uint64) (found bool, err error) {
	var b [8]byte
	for slot := int64(inode*0x9e3779b97f4a7c15>>16) & (s.slots - 1); ; slot = (slot + 1) & (s.slots - 1) {
		n, err := s.file.ReadAt(b[:], s.at+8*slot)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		switch have := binary.NativeEndian.Uint64(b[:]); {
		case n < len(b) || have == 0:
			binary.NativeEndian.PutUint64(b[:], inode)
			_, err := s.file.WriteAt(b[:], s.at+8*slot)
			return false, err
		case have == inode:
			return true, nil
		}
	}
}

// grow doubles the slots. The new table is behind the old one in the file.
func (s *inodeSet) grow() error {
	old := io.NewSectionReader(s.file, s.at, 8*s.slots)
	s.at, s.slots = s.at+8*s.slots, 2*s.slots
	for buf := make([]byte, 64<<10); ; {
		n, err := io.ReadFull(old, buf)
		for b := buf[:n&^7]; len(b) > 0; b = b[8:] {
			if inode := binary.NativeEndian.Uint64(b); inode != 0 {
				if _, err := s.insert(inode); err != nil {
					return err
				}
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
