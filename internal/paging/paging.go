// Package paging fills the pages of a list from sections that have their own pages, for example backends,
// pools or nodes.
//
// A token is a token of a section, or the ID of the last entry of a page. It contains no position, so it
// remains valid while entries are created and deleted.
package paging

import (
	"cmp"
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/volume"
)

// MaxPage is the maximum number of entries of a page. A page with so many entries is much smaller than the
// maximum size of a gRPC message.
const MaxPage = 5000

// Limit returns the maximum number of entries for the field max_entries of a request. It fails with ErrInvalid
// if the field is negative.
func Limit(maxEntries int32) (int, error) {
	if maxEntries < 0 {
		return 0, volume.Errorf(volume.ErrInvalid, "max_entries is %d: it must not be negative", maxEntries)
	}
	if maxEntries == 0 || maxEntries > MaxPage {
		return MaxPage, nil
	}
	return int(maxEntries), nil
}

// StaleToken returns the error for a token that is not from the driver (ErrStaleToken).
func StaleToken(token string) error {
	return volume.Errorf(volume.ErrStaleToken, "starting_token %q is not from this driver: list from the beginning", token)
}

// Section returns up to limit entries after a token, and the token of the next page. An empty token
// requests the first page; an empty next means that the section has no further page.
type Section[E any] func(ctx context.Context, token string, limit int) (entries []E, next string, err error)

// Serial lists one section after the other.
const Serial = 1

// Fill returns a page of up to limit entries from the sections in their order, and the token of the
// next page, which is empty at the end. The first section continues after token. id returns the ID
// of an entry, which must be a valid token of its section.
//
// Fill lists up to parallel sections concurrently. It starts with up to four, because a few sections often fill the
// page.
func Fill[E any](ctx context.Context, sections []Section[E], token string, limit, parallel int, id func(E) string) (entries []E, next string, err error) {
	for window := min(4, parallel); len(sections) > 0; window = min(2*window, parallel) {
		parts, err := fetch(ctx, sections[:min(window, len(sections))], token, limit-len(entries))
		if err != nil {
			return nil, "", err
		}
		for _, p := range parts {
			if room := limit - len(entries); len(p.entries) > room {
				p.entries, p.next = p.entries[:room], id(p.entries[room-1])
			}
			entries, token = append(entries, p.entries...), p.next
			if p.next == "" {
				sections = sections[1:]
			}
			if len(entries) == limit && len(sections) > 0 {
				return entries, cmp.Or(token, id(entries[limit-1])), nil
			}
			if p.next != "" {
				break // the rest of this section precedes the other parts
			}
		}
	}
	return entries, "", nil
}

// part is the result of one call of a section.
type part[E any] struct {
	entries []E
	next    string
}

// fetch calls sections concurrently. The first one continues after token.
func fetch[E any](ctx context.Context, sections []Section[E], token string, limit int) ([]part[E], error) {
	parts := make([]part[E], len(sections))
	group, ctx := errgroup.WithContext(ctx)
	for i, section := range sections {
		from := ""
		if i == 0 {
			from = token
		}
		group.Go(func() (err error) {
			parts[i].entries, parts[i].next, err = section(ctx, from, limit)
			return err
		})
	}
	return parts, group.Wait()
}
