// Answers left as the next product takes them: in the order of its stored inputs, so that nobody need prepare them for it.
// A root mean square before it is taken as well, but for its factor, which is the next product's to find: from the sums of
// squares that every thread block leaves for its own outputs.

#define NO_SLOT 65535

struct EpilogueTarget {
    const uint4* places;  // of each output: stored inputs that it is, NOWHERE behind the last of up to eight
    const u16* gaps;      // stored inputs that are nobody's, to be zero
    const float* norm;    // what each output is multiplied by; null: nothing
    u16* words;           // of few rows (thirty-two inputs, row, 32), else (eight inputs, eight rows, input, row); or null
    float* squares;       // (row, share); null: nobody asks for them
    int empty, room, shares, few;  // gaps, rows there is room for, thread blocks that leave squares
};

DEVICE u16* packed_slot(const EpilogueTarget& heir, u32 place, int row) {
    if (heir.few) return heir.words + (place / 32 * heir.room + row) * 32 + place % 32;
    const u32 matrix = place / 32 * 4 + place % 8 / 2, input = place % 32 / 8 * 2 + place % 2;  // for the tensor cores
    return heir.words + ((matrix * (heir.room / 8) + row / 8) * 8 + input) * 8 + row % 8;
}

// A number of a row to all places of its output.
DEVICE void store_prepacked(const EpilogueTarget& heir, uint4 places, int row, u16 number) {
    const u32 pairs[4] = {places.x, places.y, places.z, places.w};
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 place = pairs[i / 2] >> i % 2 * 16 & 65535;
        if (place == NO_SLOT) return;
        *packed_slot(heir, place, row) = number;
    }
}

// The same of eight rows, where they lie together.
DEVICE void store_prepacked8(const EpilogueTarget& heir, uint4 places, int row, const u16 (&halves)[8]) {
    const u32 pairs[4] = {places.x, places.y, places.z, places.w};
    u32 words[4];
    UNROLL for (int w = 0; w < 4; w++) words[w] = halves[2 * w] | (u32)halves[2 * w + 1] << 16;
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 place = pairs[i / 2] >> i % 2 * 16 & 65535;
        if (place == NO_SLOT) return;
        *(uint4*)packed_slot(heir, place, row) = uint4{words[0], words[1], words[2], words[3]};
    }
}

// Gaps of rows, shared out to threads; a thread's first is looked up before it may be written.
struct PadWriter {
    int at;
    u32 place;

    DEVICE void find(const EpilogueTarget& heir, int thread) {
        at = thread;
        place = heir.words && at < heir.empty * heir.room ? heir.gaps[at / heir.room] : NO_SLOT;
    }
    DEVICE void close(const EpilogueTarget& heir, int threads) {
        while (place != NO_SLOT) {
            *packed_slot(heir, place, at % heir.room) = 0;
            find(heir, at + threads);
        }
    }
};
