package pool

import (
	"context"
	"os"
	"strconv"
)

// showGrowth shows other processes what is promised to a volume beyond its record,
// until they are told to read that again (see TellGrowth): by this process, or, if it
// ends before, by who clears what it left.
func (p *Pool) showGrowth(name string, more int64) error {
	if !p.Shared() {
		return nil
	}
	entry, err := p.tmpName(name, strconv.FormatInt(more, 10)+growSuffix)
	if err != nil {
		return err
	}
	p.owner.mu.Lock()
	p.owner.growing[name] = entry
	p.owner.mu.Unlock()
	f, err := p.openRegular(p.tmp, entry, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// TellGrowth tells other processes that a volume's record has another size, if a call
// of this one that grew it could not. The caller holds the volume's folder
// (LockVolume).
func (p *Pool) TellGrowth(ctx context.Context, name string) error {
	if p.owner.growingAs(name) == "" {
		return nil
	}
	if err := p.noteGrowth(context.WithoutCancel(ctx), name); err != nil {
		return err
	}
	return p.hideGrowth(name)
}

func (p *Pool) hideGrowth(name string) error {
	entry := p.owner.growingAs(name)
	if entry == "" {
		return nil
	}
	if err := p.root.Remove(tmpDir + "/" + entry); err != nil && !isGone(err) {
		return err
	}
	p.owner.mu.Lock()
	defer p.owner.mu.Unlock()
	delete(p.owner.growing, name)
	return nil
}

func (o *owner) growingAs(name string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.growing[name]
}
