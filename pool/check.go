package pool

import (
	"encoding/json"
	"os"
	"time"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// Checks reports whether a key about checks is set.
func (c Config) Checks() bool { return c.Check != "" || c.CheckWindow != "" }

// Checking parses the keys about checks. The error is ErrInvalid, about the returned key.
func (c Config) Checking() (s Schedule, key string, err error) {
	return parseSchedule("check", c.Check, c.CheckWindow)
}

// checkedFile in a volume's folder contains the result of the last complete check of the volume's filesystem.
const checkedFile = "checked"

// Checked is the result of a check of a volume's filesystem.
type Checked struct {
	// At is the time at which the copy was taken that was checked.
	At time.Time `json:"at"`
	// Damaged means that the filesystem has errors.
	Damaged bool `json:"damaged"`
}

// Checked returns the result of the last check of a volume; ok is false if there is none.
func (p *Pool) Checked(v volume.Volume) (c Checked, ok bool, err error) {
	b, err := p.files.Read(p.volumes, v.ID.Name+"/"+checkedFile)
	if beneath.IsNotExist(err) {
		return c, false, nil
	}
	if err != nil {
		return c, false, err
	}
	return c, json.Unmarshal(b, &c) == nil, nil // an unreadable result is as none
}

// SetChecked durably records the result of a check.
func (p *Pool) SetChecked(name string, c Checked) error {
	c.At = c.At.UTC().Truncate(time.Second)
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return p.inFolder(name, func(folder *os.Root) error { return atomicfile.Write(folder, checkedFile, append(b, '\n')) })
}
