// Package paging fills the pages of a list that consists of sections, each of which has
// pages of its own: backends, pools, nodes.
//
// A token is what a section returned, or the ID of the last entry of a page. It names no
// position, so it stays valid while entries come and go.
package paging

import (
	"cmp"
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/volume"
)

// maxPage is the largest page, also of a request without a limit: far below what a gRPC
// message can hold.
const maxPage = 5000

// Limit reads the field max_entries of a request.
func Limit(maxEntries int32) (int, error) {
	if maxEntries < 0 {
		return 0, volume.Errorf(volume.ErrInvalid, "max_entries is %d: it must not be negative", maxEntries)
	}
	if maxEntries == 0 || maxEntries > maxPage {
		return maxPage, nil
	}
	return int(maxEntries), nil
}

// StaleToken is the error of a token that the driver did not make.
func StaleToken(token string) error {
	return volume.Errorf(volume.ErrStaleToken, "starting_token %q was not made by this driver: list from the beginning", token)
}

// Section returns up to limit entries after a token, which is empty for the beginning, and
// the token for the rest, which is empty at the end.
type Section[E any] func(ctx context.Context, token string, limit int) (entries []E, next string, err error)

// Serial lists one section after the other.
const Serial = 1

// Fill fills a page of limit entries from sections in their order, the first from a token
// on. It returns the token for the rest, which is empty at the end. id is the ID of an
// entry, which the section of the entry takes as a token, and so does the caller of Fill.
//
// Up to parallel sections are listed at once. The first are fewer: a page is often full
// after them.
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
				break // the parts behind it are listed again, after its rest
			}
		}
	}
	return entries, "", nil
}

// part is what one call returned of a section.
type part[E any] struct {
	entries []E
	next    string
}

// fetch calls some sections at once, the first from the token on.
func fetch[E any](ctx context.Context, some []Section[E], token string, limit int) ([]part[E], error) {
	parts := make([]part[E], len(some))
	group, ctx := errgroup.WithContext(ctx)
	for i, section := range some {
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
